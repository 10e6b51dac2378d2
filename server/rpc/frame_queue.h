// SPDX-License-Identifier: Apache-2.0
// The outgoing half of one Exchange stream. Core can give an answer on any thread, also after the stream has ended: its
// callbacks therefore hold this queue and never the stream.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <grpcpp/support/byte_buffer.h>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/frame_codec.h"

namespace precondor::rpc {

// Queues frames, writes them one message at a time, and counts the answers that are still owed. Thread-safe. The queue
// calls its callbacks under its lock, so that none runs after Close has returned; they only start gRPC operations.
class FrameQueue {
 public:
  struct Events {
    // Starts writing the message, which stays valid until Written. `more` is true if another frame is queued. Returns
    // true if the message is written already; Written then does not follow.
    std::function<bool(const grpc::ByteBuffer*, bool more)> write;
    // Called when the queue, which was full at the last PauseWhenFull, is no longer full.
    std::function<void()> resume;
    // Called once, after HalfClose, when no answer is owed and all frames are written.
    std::function<void()> drained;
    // `now` returns the time. `replied` gets the time from the Push of an answer's last frame until the transport has
    // taken that frame. Either both are set or neither is.
    std::function<absl::Time()> now = nullptr;
    std::function<void(absl::Duration)> replied = nullptr;
  };
  // The queue is full while its frames take more than `limit_bytes` of memory. A peer that does not read fills it with
  // the answers to its own contributions.
  FrameQueue(Events events, size_t limit_bytes) : events_(std::move(events)), limit_bytes_(limit_bytes) {}

  // Appends a frame; an empty `payload` means a frame without payload. Drops the frame after Close.
  void Push(v1::ExchangeResponse frame, wire::PayloadPart payload = {});
  // Records that the current write has succeeded, and starts the next one.
  void Written();

  // Lets the queue send consecutive small frames in one bundle. Call when the peer accepts bundles.
  void AllowBundles();
  // Hold stops the queue from starting writes until Release, so that the answers to a bundle can leave in one bundle.
  void Hold();
  void Release();

  // Returns true if the queue is full. The caller then reads nothing from the peer until `resume`.
  bool PauseWhenFull();

  // Count one more owed answer, and one fewer.
  void AddPendingAnswer();
  void MarkAnswered();
  // Like AddPendingAnswer and MarkAnswered, for an answer that can be large and that no credit covers.
  // AddNamedPendingAnswer returns false and counts nothing if an answer of this name is already owed or the queue is
  // full.
  bool AddNamedPendingAnswer(const std::string& name);
  void MarkAnsweredOnce(const std::string& name);
  // Records that the peer sends no more contributions.
  void HalfClose();
  // After Close returns, no write starts and no callback runs. Returns false if the queue was closed before.
  bool Close();

 private:
  struct Frame {
    v1::ExchangeResponse message;
    wire::PayloadPart payload;
    size_t bytes = 0;                                   // memory that the frame takes, about
    std::optional<absl::Time> answered = std::nullopt;  // time of the Push, if this is the last frame of an answer
  };
  void EndWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes the next frame, or as many as fit into one bundle.
  std::vector<Frame> TakeNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CheckDrained() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Events events_;
  const size_t limit_bytes_;
  Mutex mu_;
  std::deque<Frame> frames_ ABSL_GUARDED_BY(mu_);
  grpc::ByteBuffer writing_message_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Time> writing_answered_ ABSL_GUARDED_BY(mu_);  // Frame::answered of the current write
  size_t waiting_bytes_ ABSL_GUARDED_BY(mu_) = 0;                    // memory that frames_ take, about
  bool paused_ ABSL_GUARDED_BY(mu_) = false;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  bool bundles_ ABSL_GUARDED_BY(mu_) = false;
  int64_t owed_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<std::string> owed_once_ ABSL_GUARDED_BY(mu_);
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

// Pushes an ERROR frame with `status` for the contribution.
void PushError(FrameQueue& queue, const v1::FrameHeader& contribution, const absl::Status& status);
// Pushes an ACK frame. `duplicate` says that the shard already had the contribution.
void PushAck(FrameQueue& queue, const v1::FrameHeader& contribution, bool duplicate, uint64_t updates_lost = 0);

}  // namespace precondor::rpc

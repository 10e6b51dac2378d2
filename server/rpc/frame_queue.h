// SPDX-License-Identifier: Apache-2.0
// The outgoing half of one Exchange stream. Core's answers come on any thread and may come after the stream has ended;
// they hold this queue, never the stream.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <grpcpp/support/byte_buffer.h>
#include <optional>
#include <set>
#include <string>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/frame_codec.h"

namespace precondor::rpc {

// Frames to write, one message at a time, and contributions still to be answered. Thread-safe. The callbacks are called
// under the queue's lock, so that none is called once Close has returned; they only start gRPC operations.
class FrameQueue {
 public:
  struct Events {
    // Starts writing the message, which stays valid until Written; `more`: another one waits behind it.
    std::function<void(const grpc::ByteBuffer*, bool more)> write;
    // The queue was full when PauseWhenFull was asked, and is so no more.
    std::function<void()> resume;
    // Half-closed, all answered, all written.
    std::function<void()> drained;
    // The time, and how long an answer waited from Push until the transport took its last frame; both may be empty.
    std::function<absl::Time()> now = nullptr;
    std::function<void(absl::Duration)> replied = nullptr;
  };
  // `limit_bytes`: with more than that waiting in memory the queue is full; a peer that does not read has it filled by
  // its own contributions' answers.
  FrameQueue(Events events, size_t limit_bytes) : events_(std::move(events)), limit_bytes_(limit_bytes) {}

  // A null part: no payload.
  void Push(v1::ExchangeResponse frame, wire::PayloadPart payload = {});
  // The write under way has ended well; begins the next.
  void Written();

  // The peer takes bundles: from now on frames without payload that wait together leave in one.
  void AllowBundles();
  // Between the two nothing begins to be written, so that the answers to a bundle can leave as one.
  void Hold();
  void Release();

  // True: nothing should be read from the peer until `resume`.
  bool PauseWhenFull();

  // One more, or one less, answer is owed.
  void Owe();
  void MarkAnswered();
  // Add for an answer that may be large and was not paid for with a contribution. False, and nothing is owed: one
  // of that name is, or the queue is full.
  bool OweOnce(const std::string& name);
  void MarkAnsweredOnce(const std::string& name);
  // No more contributions will come.
  void HalfClose();
  // The stream is ending: nothing will be written any more. True for the first call only.
  bool Close();

 private:
  struct Frame {
    v1::ExchangeResponse message;
    wire::PayloadPart payload;
    size_t bytes = 0;
    std::optional<absl::Time> answered = std::nullopt;  // when the last frame of an answer was pushed
  };
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Frame TakeFront() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Frame TakeBundle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CheckDrained() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Events events_;
  const size_t limit_bytes_;
  Mutex mu_;
  std::deque<Frame> frames_ ABSL_GUARDED_BY(mu_);
  grpc::ByteBuffer writing_message_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Time> writing_answered_ ABSL_GUARDED_BY(mu_);  // of the message under way
  size_t waiting_bytes_ ABSL_GUARDED_BY(mu_) = 0;                    // of memory, of frames_
  bool paused_ ABSL_GUARDED_BY(mu_) = false;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  bool bundles_ ABSL_GUARDED_BY(mu_) = false;
  int64_t owed_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<std::string> owed_once_ ABSL_GUARDED_BY(mu_);
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor::rpc

// SPDX-License-Identifier: Apache-2.0
// The outgoing half of one Exchange stream. Core's answers come on any thread and may come after the stream has ended;
// they hold this queue, never the stream.
#pragma once

#include <deque>
#include <functional>
#include <grpcpp/support/byte_buffer.h>
#include <utility>

#include "kernels/base/mutex.h"

namespace precondor::rpc {

// Frames to write, one at a time, and contributions still to be answered. Thread-safe. The two callbacks are called
// under the queue's lock, so that none is called once Close has returned; they only start gRPC operations.
class FrameQueue {
 public:
  // `write` starts writing the frame, which stays valid until Written; `more`: another one waits behind it. `drained`:
  // half-closed, all answered, all written.
  FrameQueue(std::function<void(const grpc::ByteBuffer*, bool more)> write, std::function<void()> drained)
      : write_(std::move(write)), drained_(std::move(drained)) {}

  void Push(grpc::ByteBuffer frame) {
    MutexLock lock(mu_);
    if (closed_) return;
    frames_.push_back(std::move(frame));
    if (frames_.size() == 1) write_(&frames_.front(), frames_.size() > 1);
  }

  // The write under way has ended well; begins the next.
  void Written() {
    MutexLock lock(mu_);
    if (closed_) return;
    frames_.pop_front();
    if (!frames_.empty()) return write_(&frames_.front(), frames_.size() > 1);
    CheckDrained();
  }

  // One more, or one less, answer is owed.
  void Owe() {
    MutexLock lock(mu_);
    ++owed_;
  }
  void Settle() {
    MutexLock lock(mu_);
    --owed_;
    CheckDrained();
  }

  // No more contributions will come.
  void HalfClose() {
    MutexLock lock(mu_);
    half_closed_ = true;
    CheckDrained();
  }

  // The stream is ending: nothing will be written any more. True for the first call only.
  bool Close() {
    MutexLock lock(mu_);
    return !std::exchange(closed_, true);
  }

 private:
  void CheckDrained() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (closed_ || !half_closed_ || owed_ != 0 || !frames_.empty()) return;
    closed_ = true;
    drained_();
  }

  const std::function<void(const grpc::ByteBuffer*, bool more)> write_;
  const std::function<void()> drained_;
  Mutex mu_;
  std::deque<grpc::ByteBuffer> frames_ ABSL_GUARDED_BY(mu_);
  int64_t owed_ ABSL_GUARDED_BY(mu_) = 0;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor::rpc

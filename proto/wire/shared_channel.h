// SPDX-License-Identifier: Apache-2.0
// The messages of one stream through shared memory, in place of its gRPC call, which stays open: the call's end is the
// end of the stream, also if a peer dies.
//
// grpcpp is included only by the .cc; callers need <grpcpp/support/byte_buffer.h> for the type.
#pragma once

#include <atomic>
#include <functional>
#include <grpcpp/support/byte_buffer.h>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "proto/wire/shared_memory.h"

namespace precondor::wire {

// One side's end of the memory. A thread of its own reads. Thread-safe.
class SharedChannel {
 public:
  enum class Side : uint8_t { kServer, kClient };
  // All are called on the channel's thread, and none after the destructor has begun to wait for it.
  struct Events {
    // Takes one message, which is valid during the call. Returns false to get no more of them until Resume.
    std::function<bool(absl::string_view message)> read;
    // The message that Write has kept is written.
    std::function<void()> written;
    // The peer has broken the memory's state. No other event follows.
    std::function<void(const absl::Status&)> broken;
  };
  // Starts the thread. Returns UNAVAILABLE if the system has none left.
  static absl::StatusOr<std::unique_ptr<SharedChannel>> Start(Side side, std::unique_ptr<SharedMemory> memory,
                                                              Events events);
  // Ends the thread, and waits for an event that is running. A client first reads the messages in its pipe: its
  // server has sent them before it ended the stream.
  ~SharedChannel();

  // Writes a message. Returns true if it has been written, and false if it is kept for the thread, because it is large
  // or because there is no room; `written` follows then. Precondition: no message is kept.
  bool Write(const grpc::ByteBuffer& message);
  // Lets `read` get messages again. May be called before `read` has returned false.
  void Resume();

 private:
  SharedChannel(Side side, std::unique_ptr<SharedMemory> memory, Events events);
  void Run();
  // Reads a client's last messages.
  void ReadRest();
  absl::Status ReadAll();
  absl::Status WriteKept();

  static constexpr size_t kLargeBytes = size_t{256} << 10;  // not copied under the caller's locks

  const Side side_;
  const std::unique_ptr<SharedMemory> memory_;
  const Events events_;
  Doorbell& own_;
  Doorbell& peer_;
  PipeReader reader_;    // the thread's
  bool paused_ = false;  // the thread's
  std::atomic<bool> resumes_ = false;
  std::atomic<bool> ends_ = false;
  Mutex mu_;
  PipeWriter writer_ ABSL_GUARDED_BY(mu_);
  grpc::ByteBuffer kept_ ABSL_GUARDED_BY(mu_);
  bool keeps_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last
};

}  // namespace precondor::wire

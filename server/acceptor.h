// SPDX-License-Identifier: Apache-2.0
// Takes connections on a socket that listens, and goes on when the process runs out of descriptors. gRPC 1.51's own
// listener stops permanently then.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "kernels/base/mutex.h"

namespace precondor {

// Start and Stop by one thread.
class Acceptor {
 public:
  // Owns `fd`, a stream socket that listens; -1: none.
  explicit Acceptor(int fd) : fd_(fd) {}
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Calls `accepted` with each connection's descriptor, which does not block and is the callee's, on one thread. Where
  // a connection cannot be accepted, as for want of a descriptor, it stays in the socket's queue, `failed` is called
  // with errno, and the next attempt is made after 100 ms.
  void Start(std::function<void(int fd)> accepted, std::function<void(int error)> failed);
  // No more connections; returns when no call of `accepted` is under way. Idempotent.
  void Stop();

 private:
  bool stopped();
  void Loop(const std::function<void(int fd)>& accepted, const std::function<void(int error)>& failed);

  int fd_;  // -1 once stopped
  Mutex mu_;
  CondVar stop_requested_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace precondor

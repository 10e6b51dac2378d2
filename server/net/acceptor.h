// SPDX-License-Identifier: Apache-2.0
// Accepts connections on a listening socket, and continues after the process has run out of file descriptors. gRPC
// 1.51's own listener stops permanently in that case.
#pragma once

#include <functional>
#include <thread>

#include "kernels/base/mutex.h"

namespace precondor {

// Accepts connections on a thread of its own. Call Start and Stop from one thread.
class Acceptor {
 public:
  // Takes ownership of `fd`, a listening stream socket; -1 means none.
  explicit Acceptor(int fd) : fd_(fd) {}
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Starts the thread, which calls `accepted` with the descriptor of each connection. The descriptor is non-blocking
  // and owned by the callee. If a connection cannot be accepted (for example because no descriptor is free), it stays
  // in the socket's queue, the thread calls `failed` with errno and tries again after 100 ms.
  void Start(std::function<void(int fd)> accepted, std::function<void(int error)> failed);
  // Stops accepting. When it returns, no call of `accepted` is running. Idempotent.
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

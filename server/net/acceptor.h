// SPDX-License-Identifier: Apache-2.0
// Listening sockets: opens a TCP port, and accepts connections. Accepting continues after the process has run out of
// file descriptors; gRPC 1.51's own listener stops permanently in that case.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

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

struct TcpSocket {
  int fd = -1;  // bound and listening; owned by the caller
  int port = 0;
};

// Binds `address`, host:port or [host]:port, to the first of the host's addresses that can be bound. Port 0 selects a
// free one. 0.0.0.0 means all addresses of the machine, including IPv6 if it is available. Connections wait until they
// are accepted. They send without delay (TCP_NODELAY), and end if sent data are not acknowledged within
// wire::kKeepaliveTimeout. Returns Unavailable, with the address and the system's reason, if the address cannot be
// bound, for example because another process has the port. `option` is what the error names.
absl::StatusOr<TcpSocket> ListenTcp(const std::string& address, absl::string_view option = "listen");

}  // namespace precondor

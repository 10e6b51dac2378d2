// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace precondor {
namespace {

// Limits one call, so that one fast peer does not keep the others waiting.
constexpr size_t kBytesAtOnce = size_t{1} << 20;

absl::Status SystemError(absl::string_view call) {
  return absl::UnavailableError(absl::StrCat(call, " on 127.0.0.1: ", std::strerror(errno)));
}

sockaddr_in LoopbackAddress(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

Fd NewSocket(int flags) { return Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0)); }

// Small messages must not wait for large ones to fill a segment.
void DisableDelay(const Fd& fd) {
  const int on = 1;
  setsockopt(fd.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// Takes the result of send or recv. Returns false if the connection is closed, rather than without room or bytes for
// now.
bool OnlyForNow(ssize_t moved) {
  return moved > 0 || (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

}  // namespace

Fd::~Fd() {
  if (number_ >= 0) close(number_);
}

absl::StatusOr<LoopbackListener> ListenOnLoopback() {
  LoopbackListener listener{NewSocket(SOCK_NONBLOCK), 0};
  sockaddr_in address = LoopbackAddress(0);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!listener.fd.open()) return SystemError("socket");
  if (bind(listener.fd.number(), generic, size) != 0) return SystemError("bind");
  if (listen(listener.fd.number(), SOMAXCONN) != 0) return SystemError("listen");
  if (getsockname(listener.fd.number(), generic, &size) != 0) return SystemError("getsockname");
  listener.port = ntohs(address.sin_port);
  return listener;
}

absl::StatusOr<Fd> ConnectToLoopback(int port) {
  // On this host a connection is made or refused at once, so this call may be a blocking one.
  Fd fd = NewSocket(0);
  if (!fd.open()) return SystemError("socket");
  const sockaddr_in address = LoopbackAddress(port);
  if (connect(fd.number(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return SystemError("connect");
  }
  DisableDelay(fd);
  return fd;
}

absl::StatusOr<Fd> AcceptOne(const Fd& listener) {
  Fd fd(accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC));
  if (fd.open()) {
    DisableDelay(fd);
  } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED) {
    return SystemError("accept");
  }
  return fd;
}

bool SendSome(const Fd& fd, absl::string_view& rest) {
  if (rest.empty()) return true;
  const ssize_t sent = send(fd.number(), rest.data(), std::min(rest.size(), kBytesAtOnce), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) rest.remove_prefix(static_cast<size_t>(sent));
  return OnlyForNow(sent);
}

bool ReceiveSome(const Fd& fd, absl::Span<char>& rest) {
  if (rest.empty()) return true;
  const ssize_t received = recv(fd.number(), rest.data(), std::min(rest.size(), kBytesAtOnce), MSG_DONTWAIT);
  if (received > 0) rest.remove_prefix(static_cast<size_t>(received));
  return OnlyForNow(received);
}

bool WaitToRead(const Fd& fd, const Deadline& deadline) {
  pollfd ready = {.fd = fd.number(), .events = POLLIN, .revents = 0};
  while (true) {
    const int count = poll(&ready, 1, deadline.poll_ms());
    if (count > 0) return true;
    if (deadline.passed()) return false;
  }
}

}  // namespace precondor

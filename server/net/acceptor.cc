// SPDX-License-Identifier: Apache-2.0
#include "server/net/acceptor.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "proto/wire/channel.h"

namespace precondor {
namespace {

constexpr std::chrono::milliseconds kPause(100);

// accept4 on Linux also returns pending errors of the connection; these do not need a pause.
bool IsOfConnection(int error) {
  switch (error) {
    case EINTR:
    case ECONNABORTED:
    case ENETDOWN:
    case EPROTO:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH:
      return true;
    default:
      return false;
  }
}

constexpr int kTcpBacklog = 1024;  // the system's limit may be lower

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::Status Failed(absl::string_view option, const std::string& address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat(option, ": cannot bind ", address, ": ", why));
}

bool Set(int fd, int level, int option, int value) { return setsockopt(fd, level, option, &value, sizeof(value)) == 0; }

int PortOf(int fd) {
  sockaddr_storage bound = {};
  socklen_t size = sizeof(bound);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
}

// Returns -1 and sets errno if the address cannot be bound.
int Listen(const addrinfo& info) {
  const int fd = socket(info.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int unacknowledged_ms = static_cast<int>(absl::ToInt64Milliseconds(wire::kKeepaliveTimeout));
  // Connections inherit TCP_NODELAY and TCP_USER_TIMEOUT. SO_REUSEADDR lets a restarted server bind its port at once,
  // but no second server beside it.
  const bool listens =
      Set(fd, SOL_SOCKET, SO_REUSEADDR, 1) && (info.ai_family != AF_INET6 || Set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0)) &&
      Set(fd, IPPROTO_TCP, TCP_NODELAY, 1) && Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, unacknowledged_ms) &&
      bind(fd, info.ai_addr, info.ai_addrlen) == 0 && listen(fd, kTcpBacklog) == 0;
  if (listens) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

absl::StatusOr<TcpSocket> ListenOn(absl::string_view option, const std::string& address, const std::string& host,
                                   const std::string& port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return Failed(option, address, gai_strerror(error));
  }
  const AddressList addresses(found, freeaddrinfo);
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    if (const int fd = Listen(*info); fd >= 0) return TcpSocket{.fd = fd, .port = PortOf(fd)};
  }
  return Failed(option, address, std::strerror(errno));
}

}  // namespace

void Acceptor::Start(std::function<void(int fd)> accepted, std::function<void(int error)> failed) {
  thread_ = std::thread([this, accepted = std::move(accepted), failed = std::move(failed)] { Loop(accepted, failed); });
}

void Acceptor::Loop(const std::function<void(int fd)>& accepted, const std::function<void(int error)>& failed) {
  NameThisThread("acceptor");
  for (;;) {
    const int connection = accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    const int error = connection < 0 ? errno : 0;
    if (connection >= 0) accepted(connection);
    const bool pause = error != 0 && !IsOfConnection(error) && !stopped();
    if (pause) failed(error);
    MutexLock lock(mu_);
    if (pause) stop_requested_.wait_for(mu_, kPause, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_; });
    if (stop_) return;
  }
}

bool Acceptor::stopped() {
  MutexLock lock(mu_);
  return stop_;
}

void Acceptor::Stop() {
  if (fd_ < 0) return;
  {
    MutexLock lock(mu_);
    stop_ = true;
    stop_requested_.notify_all();
  }
  shutdown(fd_, SHUT_RDWR);  // accept4 returns
  if (thread_.joinable()) thread_.join();
  close(fd_);
  fd_ = -1;
}

absl::StatusOr<TcpSocket> ListenTcp(const std::string& address, absl::string_view option) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return Failed(option, address, "expected host:port");
  std::string host = address.substr(0, colon);
  const std::string port = address.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (host == "0.0.0.0") {
    if (absl::StatusOr<TcpSocket> both = ListenOn(option, address, "::", port); both.ok()) return both;
  }
  return ListenOn(option, address, host, port);
}

}  // namespace precondor

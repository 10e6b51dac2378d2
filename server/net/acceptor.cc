// SPDX-License-Identifier: Apache-2.0
#include "server/net/acceptor.h"

#include <cerrno>
#include <chrono>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "kernels/base/mutex.h"

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

}  // namespace precondor

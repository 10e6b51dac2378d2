// SPDX-License-Identifier: Apache-2.0
// TCP on 127.0.0.1 without waiting: what the local collective is made of.
#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/deadline.h"

namespace precondor {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int number) : number_(number) {}
  Fd(Fd&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Fd();
  int number() const { return number_; }
  bool open() const { return number_ >= 0; }
  void Close() { Fd().swap(*this); }
  void swap(Fd& other) noexcept { std::swap(number_, other.number_); }

 private:
  int number_ = -1;
};

struct LoopbackListener {
  Fd fd;
  int port = 0;
};

absl::StatusOr<LoopbackListener> ListenOnLoopback();
// Both give a socket that does not block. Unavailable when no process listens at `port`.
absl::StatusOr<Fd> ConnectToLoopback(int port);
// No open Fd when no connection waits to be accepted; Unavailable when the system has no room for another connection.
absl::StatusOr<Fd> AcceptOne(const Fd& listener);

// One attempt to move bytes; what was moved is taken off the front. False when the connection is gone.
bool SendSome(const Fd& fd, absl::string_view& rest);
bool ReceiveSome(const Fd& fd, absl::Span<char>& rest);

// True once `fd` can be read, or its connection is gone; false at the deadline.
bool WaitToRead(const Fd& fd, const Deadline& deadline);

}  // namespace precondor

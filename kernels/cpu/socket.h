// SPDX-License-Identifier: Apache-2.0
// Non-blocking TCP on 127.0.0.1, for the local collective.
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
// Connects to `port`, and returns a socket for non-blocking use. Returns Unavailable if no process listens there.
absl::StatusOr<Fd> ConnectToLoopback(int port);
// Accepts a connection, and returns a socket for non-blocking use. Returns an Fd that is not open if no connection
// waits, and Unavailable if the system has no resources for another connection.
absl::StatusOr<Fd> AcceptOne(const Fd& listener);

// Try once to move bytes, and remove what was moved from the front. Return false if the connection is closed.
bool SendSome(const Fd& fd, absl::string_view& rest);
bool ReceiveSome(const Fd& fd, absl::Span<char>& rest);

// Waits until `fd` can be read or its connection is closed, and returns true; returns false at the deadline.
bool WaitToRead(const Fd& fd, const Deadline& deadline);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Helpers for POSIX files. Private to server/store.
#pragma once

#include <cerrno>
#include <string>
#include <unistd.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor::store {

// Returns the status that FileSystem specifies for `error`, an errno.
absl::Status IoError(absl::string_view operation, absl::string_view path, int error);

// Repeats a call that a signal interrupted.
template <typename Call>
auto Uninterrupted(Call call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

// Owns an open file descriptor and closes it on destruction.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  // Closes the descriptor and returns its error, with `path` in the message.
  absl::Status Close(absl::string_view path);

 private:
  int fd_;
};

// Opens a file with O_CLOEXEC.
absl::StatusOr<Descriptor> OpenDescriptor(const std::string& path, int flags);

}  // namespace precondor::store

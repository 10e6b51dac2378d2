// SPDX-License-Identifier: Apache-2.0
#include "server/store/posix_calls.h"

#include <fcntl.h>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace precondor::store {

absl::Status IoError(absl::string_view operation, absl::string_view path, int error) {
  const std::string message =
      absl::StrCat(operation, " ", path, ": ", std::generic_category().message(error), " (errno ", error, ")");
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(message);
    case EEXIST:
      return absl::AlreadyExistsError(message);
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

absl::Status Descriptor::Close(absl::string_view path) {
  // Not repeated: after EINTR Linux has closed the descriptor.
  if (close(std::exchange(fd_, -1)) < 0 && errno != EINTR) return IoError("close", path, errno);
  return absl::OkStatus();
}

absl::StatusOr<Descriptor> OpenDescriptor(const std::string& path, int flags) {
  const int fd = Uninterrupted([&] { return open(path.c_str(), flags | O_CLOEXEC, 0600); });
  if (fd < 0) return IoError("open", path, errno);
  return Descriptor(fd);
}

}  // namespace precondor::store

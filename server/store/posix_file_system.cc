// SPDX-License-Identifier: Apache-2.0
#include "server/store/posix_file_system.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <fcntl.h>
#include <filesystem>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/status_macros.h"

namespace precondor::store {
namespace {

// Returns the status that FileSystem specifies for `error`, an errno.
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
  absl::Status Close(absl::string_view path) {
    // Not repeated: after EINTR Linux has closed the descriptor.
    if (close(std::exchange(fd_, -1)) < 0 && errno != EINTR) return IoError("close", path, errno);
    return absl::OkStatus();
  }

 private:
  int fd_;
};

// Opens a file with O_CLOEXEC.
absl::StatusOr<Descriptor> OpenDescriptor(const std::string& path, int flags) {
  const int fd = Uninterrupted([&] { return open(path.c_str(), flags | O_CLOEXEC, 0600); });
  if (fd < 0) return IoError("open", path, errno);
  return Descriptor(fd);
}

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(std::string path, Descriptor fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  absl::Status Append(absl::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = Uninterrupted([&] { return write(fd_.get(), bytes.data(), bytes.size()); });
      if (written < 0) return IoError("write", path_, errno);
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return absl::OkStatus();
  }

  absl::Status AppendPieces(absl::Span<const absl::string_view> pieces) override {
    std::vector<iovec> left;
    left.reserve(pieces.size());
    for (const absl::string_view piece : pieces) {
      if (!piece.empty()) left.push_back({const_cast<char*>(piece.data()), piece.size()});
    }
    for (size_t next = 0; next < left.size();) {
      const int count = static_cast<int>(std::min<size_t>(left.size() - next, IOV_MAX));
      ssize_t written = Uninterrupted([&] { return writev(fd_.get(), &left[next], count); });
      if (written < 0) return IoError("writev", path_, errno);
      for (; written > 0 && static_cast<size_t>(written) >= left[next].iov_len; ++next) {
        written -= static_cast<ssize_t>(left[next].iov_len);
      }
      if (written == 0) continue;
      left[next].iov_base = static_cast<char*>(left[next].iov_base) + written;
      left[next].iov_len -= static_cast<size_t>(written);
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (Uninterrupted([&] { return fdatasync(fd_.get()); }) < 0) return IoError("fdatasync", path_, errno);
    struct stat info;
    if (fstat(fd_.get(), &info) < 0) return IoError("fstat", path_, errno);
    if (info.st_nlink == 0) return IoError("fdatasync", path_, ENOENT);  // removed: nothing of it survives this process
    return absl::OkStatus();
  }

  void BeginWriteBack() override {
    // Only a hint: Sync reports errors.
    static_cast<void>(sync_file_range(fd_.get(), 0, 0, SYNC_FILE_RANGE_WRITE));
  }

  void DropCached(uint64_t bytes) override {
    static_cast<void>(posix_fadvise(fd_.get(), 0, static_cast<off_t>(bytes), POSIX_FADV_DONTNEED));
  }

  absl::Status Close() override { return fd_.Close(path_); }

 private:
  const std::string path_;
  Descriptor fd_;
};

class PosixFileLock final : public FileLock {
 public:
  explicit PosixFileLock(Descriptor fd) : fd_(std::move(fd)) {}

 private:
  const Descriptor fd_;  // closing it releases the lock
};

}  // namespace

absl::StatusOr<std::unique_ptr<WritableFile>> PosixFileSystem::Create(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND));
  return std::make_unique<PosixWritableFile>(path, std::move(fd));
}

absl::StatusOr<std::string> PosixFileSystem::ReadFile(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t size, FileSize(path));
  return ReadRange(path, 0, size);
}

absl::StatusOr<std::string> PosixFileSystem::ReadRange(const std::string& path, uint64_t offset, uint64_t length) {
  PRECONDOR_ASSIGN_OR_RETURN(const Descriptor fd, OpenDescriptor(path, O_RDONLY));
  struct stat info;
  if (fstat(fd.get(), &info) < 0) return IoError("fstat", path, errno);
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  std::string bytes(offset < size ? std::min(length, size - offset) : 0, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = Uninterrupted(
        [&] { return pread(fd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done)); });
    if (count < 0) return IoError("read", path, errno);
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  bytes.resize(done);
  return bytes;
}

absl::StatusOr<uint64_t> PosixFileSystem::FileSize(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) < 0) return IoError("stat", path, errno);
  return static_cast<uint64_t>(info.st_size);
}

absl::StatusOr<std::vector<std::string>> PosixFileSystem::List(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) return IoError("list", dir, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status PosixFileSystem::Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) < 0) return IoError("rename", absl::StrCat(from, " to ", to), errno);
  return absl::OkStatus();
}

absl::Status PosixFileSystem::RemoveFile(const std::string& path) {
  if (unlink(path.c_str()) < 0) return IoError("unlink", path, errno);
  return absl::OkStatus();
}

absl::Status PosixFileSystem::RemoveDir(const std::string& path) {
  if (rmdir(path.c_str()) < 0) return IoError("rmdir", path, errno);
  return absl::OkStatus();
}

absl::Status PosixFileSystem::MakeDir(const std::string& path) {
  if (mkdir(path.c_str(), 0755) == 0) return absl::OkStatus();
  const int error = errno;
  struct stat info;
  if (error == EEXIST && stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return absl::OkStatus();
  return IoError("mkdir", path, error);
}

absl::Status PosixFileSystem::SyncDir(const std::string& dir) {
  PRECONDOR_ASSIGN_OR_RETURN(const Descriptor fd, OpenDescriptor(dir, O_RDONLY | O_DIRECTORY));
  if (Uninterrupted([&] { return fsync(fd.get()); }) < 0) return IoError("fsync", dir, errno);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> PosixFileSystem::FreeSpace(const std::string& dir) {
  struct statvfs info;
  if (Uninterrupted([&] { return statvfs(dir.c_str(), &info); }) < 0) return IoError("statvfs", dir, errno);
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
}

absl::StatusOr<std::unique_ptr<FileLock>> PosixFileSystem::Lock(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor(path, O_RDWR | O_CREAT));
  if (Uninterrupted([&] { return flock(fd.get(), LOCK_EX | LOCK_NB); }) < 0) {
    if (errno == EWOULDBLOCK) return absl::FailedPreconditionError(absl::StrCat(path, ": another process holds it"));
    return IoError("flock", path, errno);
  }
  return std::make_unique<PosixFileLock>(std::move(fd));
}

}  // namespace precondor::store

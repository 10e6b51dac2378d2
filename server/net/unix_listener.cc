// SPDX-License-Identifier: Apache-2.0
#include "server/net/unix_listener.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr int kUnixBacklog = 128;

absl::Status SystemError(const std::string& path, absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("unix:", path, ": cannot ", what, ": ", std::strerror(errno)));
}

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return address;
}

template <typename Call>
int WithAddress(Call call, int fd, const std::string& path) {
  const sockaddr_un address = AddressOf(path);
  return call(fd, reinterpret_cast<const sockaddr*>(&address), socklen_t{sizeof(address)});
}

// Excludes other processes that bind or remove a path in this directory. If the directory cannot be locked, no process
// is excluded: two servers that start at one time on a path left by a third may then both believe that they have it.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& path) {
    const std::filesystem::path folder = std::filesystem::path(path).parent_path();
    fd_ = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd_ >= 0) flock(fd_, LOCK_EX);
  }
  ~DirectoryLock() {
    if (fd_ >= 0) close(fd_);
  }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_;
};

// Removes a socket that a killed server has left at `path`.
absl::Status RemoveStale(const std::string& path) {
  struct stat there = {};
  if (lstat(path.c_str(), &there) != 0) return errno == ENOENT ? absl::OkStatus() : SystemError(path, "look at it");
  if (!S_ISSOCK(there.st_mode)) {
    return absl::AlreadyExistsError(absl::StrCat("unix:", path, ": expected a socket or nothing, got another file"));
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return SystemError(path, "make a socket");
  const absl::Cleanup closing = [fd] { close(fd); };
  if (WithAddress(connect, fd, path) == 0) {
    return absl::AlreadyExistsError(absl::StrCat("unix:", path, ": another process listens there"));
  }
  if (errno != ECONNREFUSED) return SystemError(path, "tell whether a process listens there");
  return unlink(path.c_str()) == 0 ? absl::OkStatus() : SystemError(path, "remove what a server left");
}

}  // namespace

absl::Status CheckPeerUser(int fd, uid_t user) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return absl::UnavailableError(absl::StrCat("a socket's peer: ", std::strerror(errno)));
  }
  if (peer.uid == user) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("a socket's peer: expected a process of user ", user, ", got one of ", peer.uid));
}

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Bind(const std::string& path) {
  const DirectoryLock lock(path);
  PRECONDOR_RETURN_IF_ERROR(RemoveStale(path));
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return SystemError(path, "make a socket");
  absl::Cleanup closing = [fd] { close(fd); };
  // The file inherits the socket's mode, so that other users can never connect.
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0) return SystemError(path, "set its mode");
  if (WithAddress(bind, fd, path) != 0) return SystemError(path, "bind");
  struct stat file = {};
  if (listen(fd, kUnixBacklog) != 0 || lstat(path.c_str(), &file) != 0) {
    const absl::Status status = SystemError(path, "listen");
    unlink(path.c_str());
    return status;
  }
  std::move(closing).Cancel();
  return std::unique_ptr<UnixListener>(new UnixListener(path, fd, file.st_dev, file.st_ino));
}

void UnixListener::Stop() {
  if (std::exchange(stopped_, true)) return;
  {
    const DirectoryLock lock(path_);
    struct stat there = {};
    if (lstat(path_.c_str(), &there) == 0 && there.st_dev == device_ && there.st_ino == inode_) unlink(path_.c_str());
  }
  acceptor_.Stop();
}

}  // namespace precondor

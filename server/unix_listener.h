// SPDX-License-Identifier: Apache-2.0
// A socket in the file system that a server listens on. gRPC's own would take the path away from a server that runs,
// remove at its end whatever is there then, and be open to every user for a moment.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <sys/types.h>
#include <utility>

#include "absl/status/statusor.h"

#include "server/acceptor.h"

namespace precondor {

// OK when the process at the other end of a connected socket runs as `user`; PermissionDenied with both where not. A
// socket's mode does not keep root out.
absl::Status CheckPeerUser(int fd, uid_t user);

// Bind, Serve and Stop by one thread.
class UnixListener {
 public:
  // Connections are taken from now on and wait for Serve. Only this process' user may connect. A socket that no process
  // answers at, left by a process that was killed, is replaced; of several processes that bind a path at once one
  // succeeds.
  // Errors: AlreadyExists when a server answers there, or the path is no socket; Unavailable: the system's reason.
  // The path is at most kMaxUnixPathBytes long.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Bind(const std::string& path);
  ~UnixListener() { Stop(); }
  UnixListener(const UnixListener&) = delete;
  UnixListener& operator=(const UnixListener&) = delete;

  // See Acceptor::Start.
  void Serve(std::function<void(int fd)> accepted, std::function<void(int error)> failed) {
    acceptor_.Start(std::move(accepted), std::move(failed));
  }
  // No more connections. The file goes too, unless it belongs to another process by then. Idempotent.
  void Stop();

 private:
  UnixListener(std::string path, int fd, dev_t device, ino_t inode)
      : path_(std::move(path)), acceptor_(fd), device_(device), inode_(inode) {}

  const std::string path_;
  Acceptor acceptor_;
  const dev_t device_;
  const ino_t inode_;
  bool stopped_ = false;
};

}  // namespace precondor

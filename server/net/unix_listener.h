// SPDX-License-Identifier: Apache-2.0
// Listens on a unix socket. gRPC's own listener is not used: it would take the path from a running server, remove
// whatever has the path when it ends, and be open to every user for a moment.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <sys/types.h>
#include <utility>

#include "absl/status/statusor.h"

#include "server/net/acceptor.h"

namespace precondor {

// Returns OK if the process at the other end of a connected socket runs as `user`, and otherwise PermissionDenied with
// both users. Needed because a socket's mode does not exclude root.
absl::Status CheckPeerUser(int fd, uid_t user);

// Owns a listening unix socket and its file. Call Bind, Serve and Stop from one thread.
class UnixListener {
 public:
  // Listens on `path`, which has at most kMaxUnixPathBytes. Connections wait until Serve. Only this process' user (and
  // root) may connect. Replaces a socket that a killed process has left. If several processes bind a path at one time,
  // one of them succeeds.
  // Returns AlreadyExists if a server listens on the path or it is not a socket, and Unavailable with the system's
  // reason for other errors.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Bind(const std::string& path);
  ~UnixListener() { Stop(); }
  UnixListener(const UnixListener&) = delete;
  UnixListener& operator=(const UnixListener&) = delete;

  // See Acceptor::Start.
  void Serve(std::function<void(int fd)> accepted, std::function<void(int error)> failed) {
    acceptor_.Start(std::move(accepted), std::move(failed));
  }
  // Stops accepting and removes the file, unless it now belongs to another process. Idempotent.
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

// SPDX-License-Identifier: Apache-2.0
#include "tests/support/child_process.h"

#include <arpa/inet.h>
#include <cerrno>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/time/clock.h"

#include "kernels/base/check.h"

extern char** environ;

namespace precondor {

ChildProcess::ChildProcess(const std::vector<std::string>& arguments, bool quiet) {
  int in[2], out[2];
  PRECONDOR_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  if (quiet) posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  if (posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid_ = -1;
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  in_ = in[1];
  out_ = out[0];
  signal(SIGPIPE, SIG_IGN);  // a child that has ended is noticed otherwise
}

ChildProcess::~ChildProcess() {
  close(in_);
  close(out_);
  if (!running()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void ChildProcess::WriteLine(const std::string& line) {
  const std::string text = line + "\n";
  const ssize_t written = write(in_, text.data(), text.size());
  PRECONDOR_CHECK(written < 0 || written == static_cast<ssize_t>(text.size()));  // shorter than a pipe's atomic write
}

std::optional<std::string> ChildProcess::ReadLine(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    if (const size_t end = buffered_.find('\n'); end != std::string::npos) {
      const std::string line = buffered_.substr(0, end);
      buffered_.erase(0, end + 1);
      return line;
    }
    pollfd ready = {.fd = out_, .events = POLLIN, .revents = 0};
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left_ms <= 0 || poll(&ready, 1, static_cast<int>(left_ms)) <= 0) return std::nullopt;
    char bytes[4096];
    const ssize_t count = read(out_, bytes, sizeof(bytes));
    if (count <= 0) return std::nullopt;
    buffered_.append(bytes, static_cast<size_t>(count));
  }
}

void ChildProcess::Signal(int signal) {
  PRECONDOR_CHECK(pid_ > 0 && kill(pid_, signal) == 0);
  if (signal != SIGSTOP) return;
  siginfo_t stopped;
  while (waitid(P_PID, static_cast<id_t>(pid_), &stopped, WSTOPPED | WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
}

bool ChildProcess::running() {
  if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
  return pid_ > 0;
}

int FreePort() {
  const int socket_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool bound = bind(socket_fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(socket_fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  close(socket_fd);
  return bound ? ntohs(address.sin_port) : 0;
}

}  // namespace precondor

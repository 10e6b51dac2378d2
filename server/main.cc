// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

#include "kernels/base/mutex.h"
#include "kernels/base/process_setup.h"
#include "server/app/app.h"
#include "server/app/config.h"
#include "server/app/server_logger.h"
#include "server/rpc/library_log.h"

namespace {

constexpr int kUsage = 2;
constexpr char kSignalled = 's', kStopped = 'e';

// A signal handler can do little more than write to a pipe, and needs a global to find it. Blocking the signals and
// waiting for them is no alternative: libraries start threads before main, which would receive them.
int g_signal_pipe[2] = {-1, -1};

void Notify(char byte) { (void)!write(g_signal_pipe[1], &byte, 1); }

// Returns a descriptor that becomes readable when the process ends, also if it is not a child; -1 for pid 0.
absl::StatusOr<int> WatchProcess(int64_t pid) {
  if (pid == 0) return -1;
  const long fd = syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0);
  if (fd >= 0) return static_cast<int>(fd);
  return absl::InvalidArgumentError(
      absl::StrCat("exit_with_pid: expected a running process, got ", pid, ": ", std::strerror(errno)));
}

// Drains the app at each signal, and without delay when the watched process ends. Returns when the app has stopped.
void AwaitEnd(precondor::App& app, int watched) {
  std::array<pollfd, 2> events = {{{g_signal_pipe[0], POLLIN, 0}, {watched, POLLIN, 0}}};  // poll ignores -1
  for (char byte = kSignalled; byte == kSignalled;) {
    if (poll(events.data(), events.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return;
    }
    if (events[1].revents != 0) {
      app.RequestDrain(absl::Milliseconds(1));  // its clients have ended with it
      events[1].fd = -1;
    }
    if (events[0].revents == 0) continue;
    if (read(g_signal_pipe[0], &byte, 1) != 1) return;
    if (byte == kSignalled) app.RequestDrain(absl::ZeroDuration());
  }
}

int Serve(const precondor::ServerConfig& config) {
  const precondor::RealClock clock;
  const auto logger = precondor::MakeServerLogger(config, clock);
  const precondor::rpc::LibraryLog library_log(*logger);
  // Installed before other processes can know this one. A signal during the start waits in the pipe.
  if (pipe2(g_signal_pipe, O_CLOEXEC) != 0) return EXIT_FAILURE;
  struct sigaction action = {};
  action.sa_handler = [](int) { Notify(kSignalled); };
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) {
    struct sigaction before = {};
    sigaction(number, nullptr, &before);
    if (number != SIGHUP || before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);  // nohup ignores it
  }
  signal(SIGPIPE, SIG_IGN);  // of a log whose reader has ended
  const absl::StatusOr<int> watched = WatchProcess(config.exit_with_pid);
  if (!watched.ok()) {
    logger->Log(precondor::Severity::kError, "cannot start", {{"reason", watched.status().ToString()}});
    return EXIT_FAILURE;
  }
  auto app = precondor::App::Start(config, *logger);
  if (!app.ok()) {
    logger->Log(precondor::Severity::kError, "cannot start", {{"reason", app.status().ToString()}});
    return EXIT_FAILURE;
  }
  std::thread signal_thread([&] {
    precondor::NameThisThread("signals");
    AwaitEnd(**app, *watched);
  });
  const absl::Status stopped = (*app)->Wait();
  Notify(kStopped);
  signal_thread.join();
  if (stopped.ok()) return 0;
  logger->Log(precondor::Severity::kError, "factors are lost", {{"reason", absl::string_view(stopped.message())}});
  return EXIT_FAILURE;
}

// Opens what is closed of 0, 1 and 2: else the next file or socket of the server gets its log and its errors.
void OpenStandardDescriptors() {
  int opened = 0;
  while (opened >= 0 && opened <= STDERR_FILENO) opened = open("/dev/null", O_RDWR);
  if (opened > STDERR_FILENO) close(opened);
}

}  // namespace

int main(int argc, char** argv) {
  OpenStandardDescriptors();
  precondor::UseBestBlasCore();
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  precondor::KeepLargeBlocks();
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto parsed = precondor::ParseServerConfig(arguments, precondor::ProcessEnvironment());
  if (!parsed.ok()) {
    std::fprintf(stderr, "precondor-server: %s\n", std::string(parsed.status().message()).c_str());
    return kUsage;
  }
  using Action = precondor::ConfigAction;
  if (parsed->action == Action::kRun) return Serve(parsed->config);
  if (parsed->action == Action::kHelp) std::fputs(precondor::ServerHelp().c_str(), stdout);
  if (parsed->action == Action::kVersion) std::puts("precondor-server " PRECONDOR_VERSION);
  if (parsed->action == Action::kCheck) std::puts("configuration good");
  if (parsed->action == Action::kPrint) std::fputs(precondor::PrintServerConfig(parsed->config).c_str(), stdout);
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <fcntl.h>
#include <signal.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "kernels/base/blas_core.h"
#include "kernels/base/malloc_options.h"
#include "server/app.h"
#include "server/config.h"

namespace {

constexpr int kUsage = 2;
constexpr char kSignalled = 's', kStopped = 'e';

// A handler may do little more than write to a pipe, and can be told of one only through a global. Blocking the signals
// and waiting for them would not do: libraries start threads before main that take them.
int g_signal_pipe[2] = {-1, -1};

void Notify(char byte) { (void)!write(g_signal_pipe[1], &byte, 1); }

int Serve(const precondor::ServerConfig& config) {
  const precondor::RealClock clock;
  const auto logger = precondor::MakeServerLogger(config, clock);
  // Before anybody can know that the process is there. A signal that comes while it starts waits in the pipe.
  if (pipe2(g_signal_pipe, O_CLOEXEC) != 0) return EXIT_FAILURE;
  struct sigaction action = {};
  action.sa_handler = [](int) { Notify(kSignalled); };
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT}) sigaction(signal, &action, nullptr);
  auto app = precondor::App::Start(config, *logger);
  if (!app.ok()) {
    logger->Log(precondor::Severity::kError, "cannot start", {{"reason", app.status().ToString()}});
    return EXIT_FAILURE;
  }
  std::thread signal_thread([&app] {
    for (char byte = kSignalled; byte == kSignalled && read(g_signal_pipe[0], &byte, 1) == 1;) {
      if (byte == kSignalled) (*app)->RequestDrain(absl::ZeroDuration());
    }
  });
  (*app)->Wait();
  Notify(kStopped);
  signal_thread.join();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  precondor::UseBestBlasCore(argv);
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

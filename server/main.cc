// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "server/app.h"
#include "server/config.h"

namespace {

constexpr int kUsage = 2, kFailed = 1;
constexpr char kSignalled = 's', kStopped = 'e';

// A handler may do little more than write to a pipe, and can be told of one only through a global. Blocking the signals
// and waiting for them would not do: libraries start threads before main that take them.
int g_signal_pipe[2] = {-1, -1};

void Notify(char byte) { (void)!write(g_signal_pipe[1], &byte, 1); }

// Large blocks stay with the process: giving them back costs more than the copies they carry.
void TuneMalloc() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  // An arena keeps what its threads freed; by default there may be eight a core.
  mallopt(M_ARENA_MAX, static_cast<int>(std::max(2u, std::thread::hardware_concurrency())));
}

int Serve(const precondor::ServerConfig& config) {
  const precondor::RealClock clock;
  const auto logger = precondor::MakeServerLogger(config, clock);
  auto app = precondor::App::Start(config, *logger);
  if (!app.ok()) {
    logger->Log(precondor::Severity::kError, "cannot start", {{"reason", app.status().ToString()}});
    return kFailed;
  }
  std::atomic<bool> stopped = false;
  if (pipe2(g_signal_pipe, O_CLOEXEC) != 0) return kFailed;
  std::thread signal_thread([&app] {
    for (char byte = kSignalled; byte == kSignalled && read(g_signal_pipe[0], &byte, 1) == 1;) {
      if (byte == kSignalled) (*app)->RequestDrain(absl::ZeroDuration());
    }
  });
  struct sigaction action = {};
  action.sa_handler = [](int) { Notify(kSignalled); };
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  (*app)->Wait();
  Notify(kStopped);
  signal_thread.join();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  TuneMalloc();
  const auto parsed =
      precondor::ParseServerConfig(std::vector<std::string>(argv + 1, argv + argc), precondor::ProcessEnvironment());
  if (!parsed.ok()) {
    std::fprintf(stderr, "precondor-server: %s\n", std::string(parsed.status().message()).c_str());
    return kUsage;
  }
  if (parsed->action == precondor::ConfigAction::kRun) return Serve(parsed->config);
  if (parsed->action == precondor::ConfigAction::kHelp) std::fputs(precondor::ServerHelp().c_str(), stdout);
  if (parsed->action == precondor::ConfigAction::kVersion) std::puts("precondor-server " PRECONDOR_VERSION);
  if (parsed->action == precondor::ConfigAction::kCheck) std::puts("configuration good");
  if (parsed->action == precondor::ConfigAction::kPrint) {
    std::fputs(precondor::PrintServerConfig(parsed->config).c_str(), stdout);
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "server/app.h"
#include "server/config.h"

namespace {

constexpr int kUsage = 2, kFailed = 1;

// Large blocks stay with the process: giving them back costs more than the copies they carry.
void TuneMalloc() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
}

precondor::Severity ParseSeverity(const std::string& level) {
  if (level == "debug") return precondor::Severity::kDebug;
  if (level == "warning") return precondor::Severity::kWarning;
  return level == "error" ? precondor::Severity::kError : precondor::Severity::kInfo;
}

int Serve(const precondor::ServerConfig& config) {
  // Blocked in every thread made from here on, and taken by one.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const precondor::RealClock clock;
  precondor::LineLogger logger(config.log_format == "json" ? precondor::LogFormat::kJson : precondor::LogFormat::kText,
                               ParseSeverity(config.log_level), clock,
                               [](absl::string_view line) { std::fwrite(line.data(), 1, line.size(), stderr); });
  auto app = precondor::App::Start(config, logger);
  if (!app.ok()) {
    logger.Log(precondor::Severity::kError, "cannot start", {{"reason", app.status().ToString()}});
    return kFailed;
  }
  std::atomic<bool> stopped = false;
  std::thread signal_thread([&] {
    const timespec tick = {0, 100 * 1000 * 1000};
    while (!stopped) {
      if (sigtimedwait(&signals, nullptr, &tick) > 0) (*app)->RequestDrain(absl::ZeroDuration());
    }
  });
  (*app)->Wait();
  stopped = true;
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

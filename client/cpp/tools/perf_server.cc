// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf_server.h"

#include <cstdlib>
#include <fstream>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/src/control.h"
#include "kernels/base/clock.h"

extern char** environ;

namespace precondor {

absl::StatusOr<std::unique_ptr<PerfServer>> PerfServer::Start(const PerfOptions& options) {
  std::unique_ptr<PerfServer> server(new PerfServer());
  if (!options.server.empty()) {
    server->address_ = options.server;
    return server;
  }
  char folder[] = "/tmp/precondor-perf-XXXXXX";
  if (mkdtemp(folder) == nullptr) return absl::InternalError("cannot make a folder in /tmp");
  server->folder_ = folder;
  const std::string port_file = server->folder_ + "/port";
  std::vector<std::string> arguments = {options.server_binary, "--listen=127.0.0.1:0",
                                        absl::StrCat("--port-file=", port_file),
                                        absl::StrCat("--threads=", options.threads), "--log-level=error"};
  if (!options.security.tls_cert.empty()) {
    arguments.push_back(absl::StrCat("--tls-cert=", options.security.tls_cert));
    arguments.push_back(absl::StrCat("--tls-key=", options.security.tls_key));
  }
  if (!options.data_dir.empty()) arguments.push_back(absl::StrCat("--data-dir=", options.data_dir));
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  if (posix_spawn(&server->pid_, options.server_binary.c_str(), nullptr, nullptr, pointers.data(), environ) != 0) {
    server->pid_ = 0;
    return absl::NotFoundError(absl::StrCat("cannot start ", options.server_binary));
  }
  const absl::Time deadline = MonotonicNow() + absl::Seconds(30);
  Canceller canceller;
  while (MonotonicNow() < deadline && waitpid(server->pid_, nullptr, WNOHANG) == 0) {
    std::ifstream file(port_file);
    std::string port;
    if (std::getline(file, port) && !port.empty()) {
      server->address_ = port.find(':') == std::string::npos ? absl::StrCat("127.0.0.1:", port) : port;
      return server;
    }
    canceller.Pause(absl::Milliseconds(10));
  }
  return absl::UnavailableError(absl::StrCat(options.server_binary, ": did not open its port"));
}

PerfServer::~PerfServer() {
  if (pid_ != 0) {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
  if (!folder_.empty()) {
    unlink((folder_ + "/port").c_str());
    rmdir(folder_.c_str());
  }
}

int64_t PerfServer::resident_bytes() const {
  if (pid_ == 0) return 0;
  std::ifstream file(absl::StrCat("/proc/", pid_, "/statm"));
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

double PerfServer::processor_seconds() const {
  if (pid_ == 0) return 0;
  clockid_t clock = {};
  timespec time = {};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/library_log.h"

#include <grpc/support/log.h>

#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"

namespace precondor::rpc {
namespace {

// gRPC's function has no context.
struct LogTarget {
  Mutex mu;
  Logger* logger ABSL_GUARDED_BY(mu) = nullptr;
};

LogTarget& Target() {
  static auto* const target = new LogTarget;  // gRPC's threads outlive the end of main
  return *target;
}

void Log(gpr_log_func_args* line) {
  Severity severity = Severity::kDebug;
  if (line->severity == GPR_LOG_SEVERITY_INFO) severity = Severity::kInfo;
  if (line->severity == GPR_LOG_SEVERITY_ERROR) severity = Severity::kError;
  LogTarget& target = Target();
  MutexLock lock(target.mu);
  if (target.logger != nullptr) target.logger->Log(severity, "gRPC", {{"line", absl::string_view(line->message)}});
}

}  // namespace

LibraryLog::LibraryLog(Logger& logger) {
  LogTarget& target = Target();
  MutexLock lock(target.mu);
  target.logger = &logger;
  gpr_set_log_function(Log);
}

LibraryLog::~LibraryLog() {
  LogTarget& target = Target();
  MutexLock lock(target.mu);
  target.logger = nullptr;
}

}  // namespace precondor::rpc

// SPDX-License-Identifier: Apache-2.0
#include "server/app/server_logger.h"

#include <algorithm>
#include <climits>
#include <poll.h>
#include <unistd.h>

#include "server/trace/tracer.h"

namespace precondor {
namespace {

// Bounds the table. Not reached in practice, because messages are literals of the program.
constexpr size_t kMostMessages = 1000;

// False if the descriptor does not take the whole line now. Does not block: a pipe or terminal that polls as ready
// takes PIPE_BUF bytes.
bool WriteAtOnce(int descriptor, absl::string_view line) {
  while (!line.empty()) {
    pollfd ready = {.fd = descriptor, .events = POLLOUT, .revents = 0};
    if (poll(&ready, 1, 0) != 1 || ready.revents != POLLOUT) return false;
    const ssize_t written = write(descriptor, line.data(), std::min<size_t>(line.size(), PIPE_BUF));
    if (written <= 0) return false;
    line.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

ServerLogger::ServerLogger(LogFormat format, Severity threshold, const Clock& clock, int descriptor)
    : threshold_(threshold),
      clock_(clock),
      lines_(format, threshold, clock, [this, descriptor](absl::string_view line) {
        if (WriteAtOnce(descriptor, line)) return;
        MutexLock lock(mu_);
        ++dropped_;
      }) {}

bool ServerLogger::Admit(absl::string_view message, int64_t& dropped_before) {
  const absl::Time now = clock_.Now();
  MutexLock lock(mu_);
  auto found = repetitions_.find(message);
  if (found == repetitions_.end()) {
    if (repetitions_.size() == kMostMessages) return true;
    found = repetitions_.emplace(std::string(message), Repetition{}).first;
  }
  Repetition& repetition = found->second;
  if (now >= repetition.window_end) {
    dropped_before = repetition.dropped;
    repetition = {.window_end = now + kWindow, .lines = 0, .dropped = 0};
  }
  if (++repetition.lines <= kLinesPerWindow) return true;
  ++repetition.dropped;
  ++dropped_;
  return false;
}

void ServerLogger::Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields) {
  if (severity < threshold_) return;
  int64_t dropped_before = 0;
  if (!Admit(message, dropped_before)) return;
  if (dropped_before > 0) {
    lines_.Log(severity, "log lines dropped", {{"of_message", message}, {"lines", dropped_before}});
  }
  const TraceContext* const trace = trace::Operation::CurrentTrace();
  if (trace == nullptr) return lines_.Log(severity, message, fields);
  lines_.Log(severity, message, fields, {{"trace_id", trace->trace_id}, {"span_id", trace->span_id}});
}

int64_t ServerLogger::dropped_lines() const {
  MutexLock lock(mu_);
  return dropped_;
}

std::unique_ptr<Logger> MakeServerLogger(const ServerConfig& config, const Clock& clock) {
  Severity threshold = Severity::kInfo;
  if (config.log_level == "debug") threshold = Severity::kDebug;
  if (config.log_level == "warning") threshold = Severity::kWarning;
  if (config.log_level == "error") threshold = Severity::kError;
  const LogFormat format = config.log_format == "json" ? LogFormat::kJson : LogFormat::kText;
  return std::make_unique<ServerLogger>(format, threshold, clock, STDERR_FILENO);
}

}  // namespace precondor

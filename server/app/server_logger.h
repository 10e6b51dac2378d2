// SPDX-License-Identifier: Apache-2.0
// The server's log on standard error. Writing a log line never blocks a request, a step or a shutdown.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/app/config.h"

namespace precondor {

// Writes lines to a file descriptor and drops, and counts, two kinds of lines:
// - Lines that the descriptor does not take at once, because it is a pipe that its reader does not empty.
// - Lines after the first kLinesPerWindow with the same message within kWindow. The first line with that message after
//   the window follows a line that gives the number of lines dropped.
// Thread-safe.
class ServerLogger final : public Logger {
 public:
  static constexpr int64_t kLinesPerWindow = 100;
  static constexpr absl::Duration kWindow = absl::Seconds(10);

  // `clock` outlives the logger. `descriptor` stays open as long.
  ServerLogger(LogFormat format, Severity threshold, const Clock& clock, int descriptor);

  void Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields) override;
  int64_t dropped_lines() const override;

 private:
  // The lines with one message.
  struct Repetition {
    absl::Time window_end = absl::InfinitePast();
    int64_t lines = 0;    // in this window
    int64_t dropped = 0;  // of them
  };
  // True if a line with this message may be written now. `dropped_before`: lines dropped in the window that has ended.
  bool Admit(absl::string_view message, int64_t& dropped_before);

  const Severity threshold_;
  const Clock& clock_;
  LineLogger lines_;

  mutable Mutex mu_;
  std::map<std::string, Repetition, std::less<>> repetitions_ ABSL_GUARDED_BY(mu_);
  int64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
};

// The logger of a server process, with the configuration's format and threshold, on standard error.
std::unique_ptr<Logger> MakeServerLogger(const ServerConfig& config, const Clock& clock);

}  // namespace precondor

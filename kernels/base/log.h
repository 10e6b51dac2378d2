// SPDX-License-Identifier: Apache-2.0
// Structured logging: a message with named fields goes to a sink that the caller passes in. There is no global logger.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"

namespace precondor {

enum class Severity : uint8_t { kDebug, kInfo, kWarning, kError };

// A named value in a log line. Numbers stay numbers in JSON. Usual names: session, step, layer, rank, epoch, reason.
struct LogField {
  LogField(absl::string_view name, absl::string_view value);
  LogField(absl::string_view name, const char* value);
  LogField(absl::string_view name, int64_t value);
  LogField(absl::string_view name, uint64_t value);
  LogField(absl::string_view name, int value);
  LogField(absl::string_view name, unsigned value);
  LogField(absl::string_view name, double value);
  LogField(absl::string_view name, bool value);
  std::string name;
  std::string text;  // rendered value, not yet quoted
  bool quoted;       // a string in JSON
};

// A sink for log lines. Thread-safe.
class Logger {
 public:
  virtual ~Logger() = default;
  virtual void Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields = {}) = 0;
  // Number of lines that could not be written.
  virtual int64_t dropped_lines() const { return 0; }
};

enum class LogFormat : uint8_t { kText, kJson };

// Writes whole lines: "2026-01-02T03:04:05.678Z INFO message key=value ..." or one JSON object per line with ts,
// severity, message and the fields. `write` gets one line, newline included, and is called under the logger's lock.
class LineLogger final : public Logger {
 public:
  LineLogger(LogFormat format, Severity threshold, const Clock& clock, std::function<void(absl::string_view)> write);
  void Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields) override;
  // Logs `fields`, then `more`.
  void Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields,
           absl::Span<const LogField> more);

 private:
  const LogFormat format_;
  const Severity threshold_;
  const Clock& clock_;
  Mutex mu_;
  const std::function<void(absl::string_view)> write_;
};

class NullLogger final : public Logger {
 public:
  void Log(Severity, absl::string_view, std::initializer_list<LogField>) override {}
};

}  // namespace precondor

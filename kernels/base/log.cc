// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/log.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"

#include "kernels/base/printable.h"

namespace precondor {
namespace {

absl::string_view SeverityName(Severity severity) {
  switch (severity) {
    case Severity::kDebug:
      return "DEBUG";
    case Severity::kInfo:
      return "INFO";
    case Severity::kWarning:
      return "WARNING";
    case Severity::kError:
      return "ERROR";
  }
  return "UNKNOWN";
}

// Returns `text` as a JSON string, quotes included. Text lines quote their values this way too.
std::string Quote(absl::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const CodePoint next = FirstCodePoint(text);
    if (!next.printable) {
      absl::StrAppendFormat(&out, "\\u%04x", next.value);
    } else {
      if (next.value == '"' || next.value == '\\') out += '\\';
      out.append(text.data(), next.bytes);
    }
    text.remove_prefix(next.bytes);
  }
  return out += '"';
}

bool NeedsQuotes(absl::string_view text) {
  if (text.empty() || text.find_first_of(" \"=\\") != absl::string_view::npos) return true;
  for (; !text.empty(); text.remove_prefix(FirstCodePoint(text).bytes)) {
    if (!FirstCodePoint(text).printable) return true;
  }
  return false;
}

}  // namespace

LogField::LogField(absl::string_view name, absl::string_view value) : name(name), text(value), quoted(true) {}
LogField::LogField(absl::string_view name, const char* value) : LogField(name, absl::string_view(value)) {}
LogField::LogField(absl::string_view name, int64_t value) : name(name), text(absl::StrCat(value)), quoted(false) {}
LogField::LogField(absl::string_view name, uint64_t value) : name(name), text(absl::StrCat(value)), quoted(false) {}
LogField::LogField(absl::string_view name, int value) : LogField(name, static_cast<int64_t>(value)) {}
LogField::LogField(absl::string_view name, unsigned value) : LogField(name, static_cast<uint64_t>(value)) {}
// JSON has no NaN or infinity, so they become strings.
LogField::LogField(absl::string_view name, double value)
    : name(name), text(absl::StrFormat("%.9g", value)), quoted(!std::isfinite(value)) {}
LogField::LogField(absl::string_view name, bool value) : name(name), text(value ? "true" : "false"), quoted(false) {}

LineLogger::LineLogger(LogFormat format, Severity threshold, const Clock& clock,
                       std::function<void(absl::string_view)> write)
    : format_(format), threshold_(threshold), clock_(clock), write_(std::move(write)) {}

void LineLogger::Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields) {
  Log(severity, message, fields, {});
}

void LineLogger::Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields,
                     absl::Span<const LogField> more) {
  if (severity < threshold_) return;
  const std::string time = absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", clock_.Wall(), absl::UTCTimeZone());
  const bool json = format_ == LogFormat::kJson;
  std::string line = json ? absl::StrCat("{\"ts\":\"", time, "\",\"severity\":\"", SeverityName(severity),
                                         "\",\"message\":", Quote(message))
                          : absl::StrCat(time, " ", SeverityName(severity), " ", message);
  const auto append = [&line, json](const LogField& field) {
    if (json) {
      absl::StrAppend(&line, ",", Quote(field.name), ":", field.quoted ? Quote(field.text) : field.text);
    } else {
      absl::StrAppend(&line, " ", field.name, "=", NeedsQuotes(field.text) ? Quote(field.text) : field.text);
    }
  };
  for (const LogField& field : fields) append(field);
  for (const LogField& field : more) append(field);
  line += json ? "}\n" : "\n";
  MutexLock lock(mu_);
  write_(line);
}

}  // namespace precondor

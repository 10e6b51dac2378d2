// SPDX-License-Identifier: Apache-2.0
// Reads a MethodConfig's options one by one, with defaults and ranges, and refuses options that the method does not
// read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/schedule.h"
#include "kernels/base/session_spec.h"
#include "kernels/base/status_macros.h"

namespace precondor {

// kText includes schedules.
enum class OptionType : uint8_t { kFlag, kNumber, kInteger, kText };

struct OptionInfo {
  std::string name;
  OptionType type = OptionType::kText;
};

// Reads the options of one configuration. Use it once, on one thread. It keeps the first error; getters then return
// their defaults.
class OptionReader {
 public:
  // `config` must outlive the reader.
  explicit OptionReader(const MethodConfig& config) : config_(config) {}

  // Return a number in [low, high]; OpenNumber one in (low, high).
  double Number(absl::string_view name, double fallback, double low, double high);
  double OpenNumber(absl::string_view name, double fallback, double low, double high);
  int64_t Integer(absl::string_view name, int64_t fallback, int64_t low, int64_t high);
  bool Flag(absl::string_view name, bool fallback);
  // Returns a number, or a text that Schedule parses, with all values in [low, high].
  Schedule ReadSchedule(absl::string_view name, absl::string_view fallback, double low, double high);
  // Returns the index of the option's text in `choices`.
  int Choice(absl::string_view name, int fallback, absl::Span<const absl::string_view> choices);

  // Returns the first error: InvalidArgument with the method, the option, the expected values and the actual value.
  // Options that no getter has read are errors too.
  absl::Status Finish() const;
  // Returns the options that getters have read so far, in order, whether or not the configuration sets them.
  const std::vector<OptionInfo>& options_read() const { return options_read_; }

 private:
  const OptionValue* Find(absl::string_view name, OptionType type);
  double Read(absl::string_view name, OptionType type, double fallback, double low, double high, bool open);
  void Fail(absl::string_view name, absl::string_view expected, const OptionValue& got);

  const MethodConfig& config_;
  std::vector<OptionInfo> options_read_;
  absl::Status error_;
};

// Returns what `read` makes of the configuration, or the reader's first error.
template <typename Config>
absl::StatusOr<Config> ParseOptions(const MethodConfig& config, Config (*read)(OptionReader&)) {
  OptionReader reader(config);
  Config out = read(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  return out;
}

}  // namespace precondor

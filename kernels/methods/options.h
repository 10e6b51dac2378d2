// SPDX-License-Identifier: Apache-2.0
// Reads a MethodConfig's options one by one, with defaults and ranges, and finds those that nobody asked for.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/schedule.h"
#include "kernels/base/session_spec.h"

namespace precondor {

// One use, one thread. The first error is kept; getters then return their defaults.
class OptionReader {
 public:
  // `config` must outlive the reader.
  explicit OptionReader(const MethodConfig& config) : config_(config) {}

  // A number in [low, high], or in (low, high) with exclusive bounds.
  double Number(absl::string_view name, double fallback, double low, double high);
  double OpenNumber(absl::string_view name, double fallback, double low, double high);
  int64_t Integer(absl::string_view name, int64_t fallback, int64_t low, int64_t high);
  bool Flag(absl::string_view name, bool fallback);
  // A text that Schedule reads, with all values in [low, high].
  Schedule ReadSchedule(absl::string_view name, absl::string_view fallback, double low, double high);
  // Index of the option's text in `choices`.
  int Choice(absl::string_view name, int fallback, absl::Span<const absl::string_view> choices);

  // InvalidArgument that names the method, the option, what was expected and what came; also for options never read.
  absl::Status Finish() const;

 private:
  const OptionValue* Find(absl::string_view name);
  double Read(absl::string_view name, double fallback, double low, double high, bool open);
  void Fail(absl::string_view name, absl::string_view expected, const OptionValue& got);

  const MethodConfig& config_;
  absl::flat_hash_set<std::string> known_;
  absl::Status error_;
};

}  // namespace precondor

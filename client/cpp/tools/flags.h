// SPDX-License-Identifier: Apache-2.0
// Command lines of flags, each with a value, for precondor-perf and the example.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace precondor {

using FlagSetter = std::function<bool(absl::string_view)>;  // false: not a value of the flag

struct Flag {
  std::string name;  // without dashes
  FlagSetter set;
  std::string expected = {};  // its values, for messages and help
  std::string help = {};
};

// Setters that write to `out`, which outlives them.
inline FlagSetter Text(std::string& out) {
  return [&out](absl::string_view text) { return out.assign(text.data(), text.size()), true; };
}
template <typename T>
FlagSetter Integer(T& out, int64_t low, int64_t high) {
  return [&out, low, high](absl::string_view text) {
    int64_t value = 0;
    const bool known = absl::SimpleAtoi(text, &value) && value >= low && value <= high;
    if (known) out = static_cast<T>(value);
    return known;
  };
}
// A value of an enumeration from 1 to `last`, by its name in any case.
template <typename T>
FlagSetter Choice(T& out, T last, absl::string_view (*name_of)(T)) {
  return [&out, last, name_of](absl::string_view text) {
    for (int i = 1; i <= static_cast<int>(last); ++i) {
      if (absl::AsciiStrToUpper(text) != name_of(static_cast<T>(i))) continue;
      out = static_cast<T>(i);
      return true;
    }
    return false;
  };
}

// Sets flags from arguments --name=value or --name value; false when one of them asks for help. InvalidArgument names
// the flag, what was expected and what came.
absl::StatusOr<bool> ParseFlags(const std::vector<std::string>& arguments, const std::vector<Flag>& flags);

}  // namespace precondor

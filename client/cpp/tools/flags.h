// SPDX-License-Identifier: Apache-2.0
// Command lines of flags, --name=value or --name value, for the programs of this folder and the tests' own.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace precondor {

using FlagSetter = std::function<bool(absl::string_view)>;  // false: not a value of the flag

struct Flag {
  std::string name;  // without dashes
  FlagSetter set;
  std::string expected = {};  // its values, for messages
  std::string only = {};      // the command that it is for; empty: all
  bool takes_value = true;    // false: set("") when it is given
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
      if (!absl::EqualsIgnoreCase(text, name_of(static_cast<T>(i)))) continue;
      out = static_cast<T>(i);
      return true;
    }
    return false;
  };
}

struct ParsedOptions {
  bool help = false;                        // --help or -h was given; what follows it is not read
  std::vector<std::string> words;           // the arguments that are no flags
  std::map<std::string, std::string> only;  // by Flag::only: a given flag

  // InvalidArgument if a flag was given that is for another command.
  absl::Status CheckCommand(absl::string_view command) const;
};

// Sets flags. InvalidArgument names the flag, what was expected and what came; without `takes_words` also for a word.
absl::StatusOr<ParsedOptions> ParseFlags(const std::vector<std::string>& arguments, const std::vector<Flag>& flags,
                                         bool takes_words = false);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/flags.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace precondor {

absl::Status ParsedOptions::CheckCommand(absl::string_view command) const {
  for (const auto& [of, flag] : only) {
    if (of != command) return absl::InvalidArgumentError(absl::StrCat("--", flag, ": for the ", of, " only"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ParsedOptions> ParseFlags(const std::vector<std::string>& arguments, const std::vector<Flag>& flags,
                                         bool takes_words) {
  ParsedOptions parsed;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      parsed.help = true;
      return parsed;
    }
    if (takes_words && !absl::StartsWith(argument, "--")) {
      parsed.words.push_back(arguments[i]);
      continue;
    }
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(0, equals);
    const auto flag =
        std::find_if(flags.begin(), flags.end(), [&](const Flag& one) { return absl::StrCat("--", one.name) == name; });
    if (flag == flags.end() || (!flag->takes_value && name != argument)) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", argument));
    }
    if (!flag->only.empty()) parsed.only[flag->only] = flag->name;
    absl::string_view value;
    if (flag->takes_value && name == argument) {
      if (++i == arguments.size()) return absl::InvalidArgumentError(absl::StrCat(name, ": expected a value"));
      value = arguments[i];
    } else {
      value = absl::ClippedSubstr(argument, name.size() + 1);
    }
    if (flag->set(value)) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, ": expected ", flag->expected, ", got \"", value, "\""));
  }
  return parsed;
}

}  // namespace precondor

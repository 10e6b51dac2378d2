// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/flags.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace precondor {

absl::StatusOr<bool> ParseFlags(const std::vector<std::string>& arguments, const std::vector<Flag>& flags) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    if (argument == "--help" || argument == "-h") return false;
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(0, equals);
    const auto flag =
        std::find_if(flags.begin(), flags.end(), [&](const Flag& one) { return absl::StrCat("--", one.name) == name; });
    if (flag == flags.end()) return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name));
    if (equals == absl::string_view::npos && ++i == arguments.size()) {
      return absl::InvalidArgumentError(absl::StrCat(name, " needs a value"));
    }
    const absl::string_view value = equals == absl::string_view::npos ? arguments[i] : argument.substr(equals + 1);
    if (flag->set(value)) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, ": expected ", flag->expected, ", got \"", value, "\""));
  }
  return true;
}

}  // namespace precondor

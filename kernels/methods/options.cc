// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/options.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/check.h"

namespace precondor {
namespace {

std::string Text(const OptionValue& value) {
  return std::visit(
      [](const auto& v) -> std::string {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::string>) return absl::StrCat("\"", v.substr(0, 64), "\"");
        if constexpr (std::is_same_v<T, bool>) return v ? "true" : "false";
        if constexpr (std::is_same_v<T, double>) return absl::StrCat(v);
      },
      value);
}

}  // namespace

const OptionValue* OptionReader::Find(absl::string_view name, OptionType type) {
  options_read_.push_back({std::string(name), type});
  const auto it = config_.options.find(std::string(name));
  return it == config_.options.end() ? nullptr : &it->second;
}

void OptionReader::Fail(absl::string_view name, absl::string_view expected, const OptionValue& got) {
  if (!error_.ok()) return;
  error_ = absl::InvalidArgumentError(
      absl::StrCat("method ", config_.name, ": option ", name, ": expected ", expected, ", got ", Text(got)));
}

double OptionReader::Read(absl::string_view name, OptionType type, double fallback, double low, double high,
                          bool open) {
  const OptionValue* value = Find(name, type);
  if (value == nullptr) return fallback;
  const double* number = std::get_if<double>(value);
  if (number != nullptr && (open ? *number > low && *number < high : *number >= low && *number <= high)) {
    return *number;
  }
  Fail(name, absl::StrCat("a number in ", open ? "(" : "[", low, ", ", high, open ? ")" : "]"), *value);
  return fallback;
}

double OptionReader::Number(absl::string_view name, double fallback, double low, double high) {
  return Read(name, OptionType::kNumber, fallback, low, high, /*open=*/false);
}

double OptionReader::OpenNumber(absl::string_view name, double fallback, double low, double high) {
  return Read(name, OptionType::kNumber, fallback, low, high, /*open=*/true);
}

int64_t OptionReader::Integer(absl::string_view name, int64_t fallback, int64_t low, int64_t high) {
  const double number = Read(name, OptionType::kInteger, static_cast<double>(fallback), static_cast<double>(low),
                             static_cast<double>(high), /*open=*/false);
  if (number == std::floor(number)) return static_cast<int64_t>(number);
  Fail(name, "a whole number", OptionValue(number));
  return fallback;
}

bool OptionReader::Flag(absl::string_view name, bool fallback) {
  const OptionValue* value = Find(name, OptionType::kFlag);
  if (value == nullptr) return fallback;
  if (const bool* flag = std::get_if<bool>(value); flag != nullptr) return *flag;
  Fail(name, "true or false", *value);
  return fallback;
}

Schedule OptionReader::ReadSchedule(absl::string_view name, absl::string_view fallback, double low, double high) {
  const OptionValue* value = Find(name, OptionType::kText);
  const absl::StatusOr<Schedule> standard = Schedule::Parse(fallback);
  PRECONDOR_CHECK(standard.ok());
  if (value == nullptr) return *standard;
  absl::StatusOr<Schedule> schedule = absl::InvalidArgumentError("a number or a text");
  if (const auto* number = std::get_if<double>(value)) schedule = Schedule(*number);
  if (const auto* text = std::get_if<std::string>(value)) schedule = Schedule::Parse(*text);
  if (!schedule.ok()) {
    Fail(name, absl::StrCat("a schedule (", schedule.status().message(), ")"), *value);
  } else if (!(schedule->lowest() >= low && schedule->highest() <= high)) {
    Fail(name, absl::StrCat("values in [", low, ", ", high, "]"), *value);
  } else {
    return *schedule;
  }
  return *standard;
}

int OptionReader::Choice(absl::string_view name, int fallback, absl::Span<const absl::string_view> choices) {
  const OptionValue* value = Find(name, OptionType::kText);
  if (value == nullptr) return fallback;
  if (const std::string* text = std::get_if<std::string>(value); text != nullptr) {
    const auto it = std::find(choices.begin(), choices.end(), absl::string_view(*text));
    if (it != choices.end()) return static_cast<int>(it - choices.begin());
  }
  Fail(name, absl::StrJoin(choices, ", "), *value);
  return fallback;
}

absl::Status OptionReader::Finish() const {
  if (!error_.ok()) return error_;
  for (const auto& [name, value] : config_.options) {
    std::vector<std::string> names;
    for (const OptionInfo& option : options_read_) names.push_back(option.name);
    std::sort(names.begin(), names.end());
    if (std::binary_search(names.begin(), names.end(), name)) continue;
    return absl::InvalidArgumentError(absl::StrCat("method ", config_.name, ": option ", name.substr(0, 64),
                                                   ": expected one of ",
                                                   names.empty() ? "(no options)" : absl::StrJoin(names, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace precondor

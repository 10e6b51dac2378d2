// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kfac_config.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Returns an option's text as it was given, or the default's text if the option is left out.
std::string Text(const MethodConfig& config, absl::string_view name, absl::string_view fallback) {
  const auto it = config.options.find(std::string(name));
  if (it == config.options.end()) return std::string(fallback);
  if (const auto* text = std::get_if<std::string>(&it->second)) return *text;
  if (const auto* flag = std::get_if<bool>(&it->second)) return *flag ? "true" : "false";
  return Schedule::Text(std::get<double>(it->second));
}

struct Default {
  absl::string_view name;
  absl::string_view text;
};
// Defaults of the options that the state depends on, except refresh_lag.
constexpr Default kDefaults[] = {
    {"form", "EIGEN"},           {"prediv", "false"},      {"pi_split", "false"},        {"stagger", "true"},
    {"damping", "0.001"},        {"factor_decay", "0.95"}, {"factor_update_steps", "1"}, {"inv_update_steps", "1"},
    {"accumulation_steps", "1"}, {"row_scale", "1"}};

}  // namespace

uint64_t KfacConfig::Interval(const Schedule& schedule, uint64_t t) {
  return static_cast<uint64_t>(std::max(1.0, std::floor(schedule.At(t))));
}

absl::StatusOr<KfacConfig> ParseKfacConfig(const MethodConfig& config) {
  OptionReader reader(config);
  KfacConfig out = ReadKfacConfig(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  if (out.prediv && out.form == KfacForm::kInverse) {
    return absl::InvalidArgumentError("method kfac: option prediv: expected form EIGEN, got INVERSE");
  }
  for (const auto& [name, text] : kDefaults) {
    absl::StrAppend(&out.state_text, out.state_text.empty() ? "" : "; ", name, " ", Text(config, name, text));
  }
  // Omitted if 0, as in states that were saved before the option existed.
  if (out.refresh_lag > 0) absl::StrAppend(&out.state_text, "; refresh_lag ", out.refresh_lag);
  return out;
}

}  // namespace precondor

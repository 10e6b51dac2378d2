// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/fallback_config.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

absl::Status Invalid(absl::string_view field, absl::string_view expected, const absl::AlphaNum& got) {
  return absl::InvalidArgumentError(absl::StrCat("fallback.", field, ": expected ", expected, ", got ", got));
}

absl::Status CheckSteps(absl::string_view field, int32_t value) {
  constexpr int32_t kHigh = 1 << 30;
  if (value >= 1 && value <= kHigh) return absl::OkStatus();
  return Invalid(field, absl::StrCat("1 ... ", kHigh), value);
}

// Every caller passes an `ok` that is false for NaN, because it is the result of comparisons that must hold.
absl::Status CheckNumber(absl::string_view field, double value, bool ok, absl::string_view expected) {
  return ok ? absl::OkStatus() : Invalid(field, expected, value);
}

}  // namespace

absl::Status ValidateFallbackConfig(const FallbackConfig& c) {
  if (FallbackPolicyName(c.policy) == "UNKNOWN") return Invalid("policy", "1, 2 or 4", static_cast<int>(c.policy));
  if (c.policy == FallbackPolicy::kAtStep && !c.at_step) return Invalid("at_step", "a step, for AT_STEP", "none");
  PRECONDOR_RETURN_IF_ERROR(
      CheckNumber("rate_decay", c.rate_decay, c.rate_decay >= 0 && c.rate_decay < 1, "a number in [0, 1)"));
  PRECONDOR_RETURN_IF_ERROR(
      CheckNumber("lr_jump", c.lr_jump, c.lr_jump > 0 && c.lr_jump < kInfinity, "a positive number"));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("min_steps", c.min_steps));
  PRECONDOR_RETURN_IF_ERROR(CheckNumber("beta", c.beta, c.beta >= 0 && c.beta <= 1, "a number in [0, 1]"));
  return CheckSteps("patience_steps", c.patience_steps);
}

absl::string_view FallbackPolicyName(FallbackPolicy policy) {
  switch (policy) {
    case FallbackPolicy::kNever:
      return "NEVER";
    case FallbackPolicy::kLossRate:
      return "LOSS_RATE";
    case FallbackPolicy::kAtStep:
      return "AT_STEP";
  }
  return "UNKNOWN";
}

}  // namespace precondor

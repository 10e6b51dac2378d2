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

absl::Status CheckSteps(absl::string_view field, int32_t value, int32_t low) {
  constexpr int32_t kHigh = 1 << 30;
  if (value >= low && value <= kHigh) return absl::OkStatus();
  return Invalid(field, absl::StrCat(low, " ... ", kHigh), value);
}

// Every caller passes an `ok` that is false for NaN, because it is the result of comparisons that must hold.
absl::Status CheckNumber(absl::string_view field, double value, bool ok, absl::string_view expected) {
  return ok ? absl::OkStatus() : Invalid(field, expected, value);
}

std::string StepText(const std::optional<uint64_t>& step) { return step ? absl::StrCat(*step) : "none"; }

}  // namespace

absl::Status ValidateFallbackConfig(const FallbackConfig& c) {
  if (c.policy < FallbackPolicy::kNever || c.policy > FallbackPolicy::kAtStep) {
    return Invalid("policy", "1 ... 4", static_cast<int>(c.policy));
  }
  if (c.policy == FallbackPolicy::kAtStep && !c.at_step) return Invalid("at_step", "a step, for AT_STEP", "none");
  const auto decay_ok = [](double value) { return value >= 0 && value < 1; };
  PRECONDOR_RETURN_IF_ERROR(CheckNumber("loss_decay", c.loss_decay, decay_ok(c.loss_decay), "a number in [0, 1)"));
  PRECONDOR_RETURN_IF_ERROR(CheckNumber("rate_decay", c.rate_decay, decay_ok(c.rate_decay), "a number in [0, 1)"));
  PRECONDOR_RETURN_IF_ERROR(
      CheckNumber("lr_jump", c.lr_jump, c.lr_jump > 0 && c.lr_jump < kInfinity, "a positive number"));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("min_steps", c.min_steps, 1));
  PRECONDOR_RETURN_IF_ERROR(CheckNumber("beta", c.beta, c.beta >= 0 && c.beta <= 1, "a number in [0, 1]"));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("patience_steps", c.patience_steps, 1));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("probe_interval_steps", c.probe_interval_steps, 1));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("probe_settle_steps", c.probe_settle_steps, 0));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("probe_steps", c.probe_steps, 2));
  PRECONDOR_RETURN_IF_ERROR(
      CheckNumber("probe_margin", c.probe_margin, c.probe_margin >= 0 && c.probe_margin < kInfinity, "at least 0"));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("probe_wins", c.probe_wins, 1));
  PRECONDOR_RETURN_IF_ERROR(
      CheckNumber("reentry_beta", c.reentry_beta,
                  c.reentry_beta >= 0 && c.reentry_beta <= 1 && (c.reentry_beta > c.beta || !c.reentry),
                  absl::StrCat("more than beta (", c.beta, ") and at most 1")));
  PRECONDOR_RETURN_IF_ERROR(CheckSteps("reentry_min_steps", c.reentry_min_steps, 1));
  return CheckNumber("reentry_min_decrease", c.reentry_min_decrease,
                     c.reentry_min_decrease >= 0 && c.reentry_min_decrease < kInfinity, "at least 0");
}

absl::string_view FallbackPolicyName(FallbackPolicy policy) {
  switch (policy) {
    case FallbackPolicy::kNever:
      return "NEVER";
    case FallbackPolicy::kLossRate:
      return "LOSS_RATE";
    case FallbackPolicy::kCostAware:
      return "COST_AWARE";
    case FallbackPolicy::kAtStep:
      return "AT_STEP";
  }
  return "UNKNOWN";
}

std::string DescribeDifference(const FallbackConfig& have, const FallbackConfig& want) {
  std::string difference;
  const auto text = [&difference](absl::string_view field, const absl::AlphaNum& a, const absl::AlphaNum& b) {
    if (difference.empty()) difference = absl::StrCat(field, ": have ", a, ", got ", b);
  };
  const auto compare = [&text](absl::string_view field, auto a, auto b) {
    if (a != b) text(field, a, b);
  };
  compare("policy", FallbackPolicyName(have.policy), FallbackPolicyName(want.policy));
  compare("at_step", absl::string_view(StepText(have.at_step)), absl::string_view(StepText(want.at_step)));
  compare("loss_decay", have.loss_decay, want.loss_decay);
  compare("rate_decay", have.rate_decay, want.rate_decay);
  compare("lr_jump", have.lr_jump, want.lr_jump);
  compare("min_steps", have.min_steps, want.min_steps);
  compare("beta", have.beta, want.beta);
  compare("patience_steps", have.patience_steps, want.patience_steps);
  compare("probe_interval_steps", have.probe_interval_steps, want.probe_interval_steps);
  compare("probe_settle_steps", have.probe_settle_steps, want.probe_settle_steps);
  compare("probe_steps", have.probe_steps, want.probe_steps);
  compare("probe_margin", have.probe_margin, want.probe_margin);
  compare("probe_wins", have.probe_wins, want.probe_wins);
  compare("reentry", int{have.reentry}, int{want.reentry});
  compare("reentry_beta", have.reentry_beta, want.reentry_beta);
  compare("reentry_min_steps", have.reentry_min_steps, want.reentry_min_steps);
  compare("reentry_min_decrease", have.reentry_min_decrease, want.reentry_min_decrease);
  return difference;
}

}  // namespace precondor

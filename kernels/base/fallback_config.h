// SPDX-License-Identifier: Apache-2.0
// Configuration of when a session falls back to first order (MKOR-H; docs/use/methods/mkor_h.md). A plain value, part
// of SessionSpec. The rules themselves are in server/policy/fallback.h.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/fields.h"

namespace precondor {

enum class FallbackPolicy : uint8_t { kNever = 1, kLossRate = 2, kAtStep = 4 };

// "Counted steps" are the steps that were not skipped and whose loss was finite.
struct FallbackConfig {
  FallbackPolicy policy = FallbackPolicy::kNever;
  // AT_STEP: the first step in first order. AT_STEP requires it; other policies ignore it.
  std::optional<uint64_t> at_step = std::nullopt;

  // Trend of the smoothed loss. Every policy computes it; LOSS_RATE decides by it.
  double rate_decay = 0.99;     // weight of the past in the smoothed decrease per step, in [0, 1)
  double lr_jump = 0.1;         // relative change of the learning rate in one step that begins a new phase, positive
  int32_t min_steps = 200;      // counted steps of a phase before the first decision, at least 1
  double beta = 0.1;            // "slow" means below this share of the phase's mean decrease per step, in [0, 1]
  int32_t patience_steps = 50;  // consecutive counted steps that must be slow before the fallback, at least 1

  bool operator==(const FallbackConfig&) const = default;
};
PRECONDOR_FIELDS(FallbackConfig, policy, at_step, rate_decay, lr_jump, min_steps, beta, patience_steps)

// Returns InvalidArgument with the field ("fallback.beta"), the expected values and the actual value.
absl::Status ValidateFallbackConfig(const FallbackConfig& config);

// "NEVER", "LOSS_RATE", "AT_STEP"; for messages, logs and metrics.
absl::string_view FallbackPolicyName(FallbackPolicy policy);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Configuration of when a session falls back to first order (MKOR-H; docs/use/methods/mkor_h.md). A plain value, part
// of SessionSpec. The rules themselves are in server/policy/fallback.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

enum class FallbackPolicy : uint8_t { kNever = 1, kLossRate = 2, kCostAware = 3, kAtStep = 4 };

// "Counted steps" are the steps that were not skipped and whose loss was finite.
struct FallbackConfig {
  FallbackPolicy policy = FallbackPolicy::kNever;
  // AT_STEP: the first step in first order. AT_STEP requires it; other policies ignore it.
  std::optional<uint64_t> at_step = std::nullopt;

  // Smoothed loss and its trend. Every policy computes them; LOSS_RATE and re-entry decide by them.
  double loss_decay = 0.95;     // weight of the past in the smoothed loss, in [0, 1)
  double rate_decay = 0.99;     // weight of the past in the smoothed decrease per step, in [0, 1)
  double lr_jump = 0.1;         // relative change of the learning rate in one step that begins a new phase, positive
  int32_t min_steps = 200;      // counted steps of a phase before the first decision, at least 1
  double beta = 0.1;            // "slow" means below this share of the phase's mean decrease per step, in [0, 1]
  int32_t patience_steps = 50;  // consecutive counted steps with equal verdict before a decision, at least 1

  // COST_AWARE.
  int32_t probe_interval_steps = 1000;  // counted steps between rounds, at least 1
  int32_t probe_settle_steps = 20;      // counted steps left out after each change of mode, at least 0
  int32_t probe_steps = 100;            // counted steps of each of a round's three windows, at least 2
  double probe_margin = 0.1;            // fraction by which first order must be better, at least 0
  int32_t probe_wins = 3;               // consecutive rounds that first order must win, at least 1

  // Return to second order; LOSS_RATE and COST_AWARE only.
  bool reentry = false;
  // "Fast" means at least this share of the phase's mean decrease; above beta, at most 1.
  double reentry_beta = 0.5;
  // Minimum number of steps in first order, at least 1. Every re-entry doubles it.
  int32_t reentry_min_steps = 1000;
  // Required relative decrease of the smoothed loss in the phase, at least 0.
  double reentry_min_decrease = 0.05;

  bool operator==(const FallbackConfig&) const = default;
};

// Returns InvalidArgument with the field ("fallback.beta"), the expected values and the actual value.
absl::Status ValidateFallbackConfig(const FallbackConfig& config);

// "NEVER", "LOSS_RATE", "COST_AWARE", "AT_STEP"; for messages, logs and metrics.
absl::string_view FallbackPolicyName(FallbackPolicy policy);

// Returns the first field in which the two differ, as "beta: have 0.1, got 0.2", or an empty string if they are equal.
std::string DescribeDifference(const FallbackConfig& have, const FallbackConfig& want);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The comparisons behind server/policy/fallback.h, for its own sources. Pure functions; docs/methods/mkor_h.md.
#pragma once

#include <cstdint>

#include "server/policy/fallback.h"

namespace precondor::fallback_rules {

// LOSS_RATE and COST_AWARE: whether the losses decide anything.
bool HasRule(const FallbackConfig& config);

// What the smoothed rate is compared with: beta, or in first order reentry_beta, times the phase's mean rate.
double ThresholdRate(const FallbackConfig& config, const FallbackState& state);

// Whether the phase has min_steps counted steps.
bool OldEnough(const FallbackConfig& config, const FallbackState& state);

// Steps in first order before re-entry.
uint64_t RequiredStay(const FallbackConfig& config, const FallbackState& state);

// Whether the last step's trend speaks for leaving the policy's mode.
bool SpeaksForChange(const FallbackConfig& config, const FallbackState& state);

// The mode that the rules lead to, an operator and probes left aside. While a mode is forced nothing is counted towards
// a change, so it stays.
Mode PolicyMode(const FallbackConfig& config, const FallbackState& state);

}  // namespace precondor::fallback_rules

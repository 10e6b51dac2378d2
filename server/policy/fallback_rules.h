// SPDX-License-Identifier: Apache-2.0
// Comparisons used by the sources of server/policy/fallback.h. Pure functions; docs/use/methods/mkor_h.md.
#pragma once

#include <cstdint>

#include "server/policy/fallback.h"

namespace precondor::fallback_rules {

// Returns whether the policy decides by losses: LOSS_RATE and COST_AWARE do.
bool HasRule(const FallbackConfig& config);

// Returns the rate that the smoothed rate is compared with: beta (in first order reentry_beta) times the phase's mean
// rate.
double ThresholdRate(const FallbackConfig& config, const FallbackState& state);

// Returns whether the phase has at least min_steps counted steps.
bool HasMinSteps(const FallbackConfig& config, const FallbackState& state);

// Returns the number of steps in first order that must pass before re-entry.
uint64_t RequiredStay(const FallbackConfig& config, const FallbackState& state);

// Returns whether the trend after the last step indicates leaving the policy's mode.
bool IndicatesChange(const FallbackConfig& config, const FallbackState& state);

// Returns the mode that the rules select, ignoring a forced mode and probes. While a mode is forced, no step counts
// towards a change, so this mode does not change.
Mode PolicyMode(const FallbackConfig& config, const FallbackState& state);

}  // namespace precondor::fallback_rules

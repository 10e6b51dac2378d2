// SPDX-License-Identifier: Apache-2.0
#include "server/policy/fallback_rules.h"

#include <algorithm>
#include <cmath>

namespace precondor::fallback_rules {
namespace {

bool IsSlow(const FallbackConfig& config, const FallbackState& state) {
  return HasMinSteps(config, state) && state.trend.rate < ThresholdRate(config, state);
}

bool IsFastAgain(const FallbackConfig& config, const FallbackState& state) {
  const LossTrend& trend = state.trend;
  const double decrease = PhaseDecrease(trend);
  return HasMinSteps(config, state) && state.last_step - state.switch_step >= RequiredStay(config, state) &&
         decrease > 0 && decrease >= config.reentry_min_decrease * std::abs(trend.phase_loss) &&
         trend.rate >= ThresholdRate(config, state);
}

}  // namespace

bool HasRule(const FallbackConfig& config) {
  return config.policy == FallbackPolicy::kLossRate || config.policy == FallbackPolicy::kCostAware;
}

double ThresholdRate(const FallbackConfig& config, const FallbackState& state) {
  return (state.mode == Mode::kSecondOrder ? config.beta : config.reentry_beta) * PhaseMeanRate(state.trend);
}

bool HasMinSteps(const FallbackConfig& config, const FallbackState& state) {
  return state.trend.started && state.trend.phase_steps >= static_cast<uint64_t>(config.min_steps);
}

// The doubling bounds the number of switches of a run whose loss stays near the threshold.
uint64_t RequiredStay(const FallbackConfig& config, const FallbackState& state) {
  return static_cast<uint64_t>(config.reentry_min_steps) << std::min<uint32_t>(state.reentries, 30);
}

bool IndicatesChange(const FallbackConfig& config, const FallbackState& state) {
  if (state.mode == Mode::kFirstOrder) return config.reentry && IsFastAgain(config, state);
  return config.policy == FallbackPolicy::kLossRate && IsSlow(config, state);
}

Mode PolicyMode(const FallbackConfig& config, const FallbackState& state) {
  if (!HasRule(config)) return state.mode;
  const bool patient = state.streak_steps >= config.patience_steps;
  if (state.mode == Mode::kFirstOrder) return patient ? Mode::kSecondOrder : Mode::kFirstOrder;
  const bool pays = config.policy == FallbackPolicy::kCostAware && state.probe.wins >= config.probe_wins;
  return patient || pays ? Mode::kFirstOrder : Mode::kSecondOrder;
}

}  // namespace precondor::fallback_rules

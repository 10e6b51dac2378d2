// SPDX-License-Identifier: Apache-2.0
#include "server/policy/fallback.h"

#include <cmath>

#include "server/policy/fallback_rules.h"

namespace precondor {
namespace {

using fallback_rules::HasMinSteps;
using fallback_rules::HasRule;
using fallback_rules::IndicatesChange;
using fallback_rules::PolicyMode;

void MoveTo(Mode mode, FallbackState& state) {
  state.mode = mode;
  state.switch_step = state.last_step;
  state.streak_steps = 0;
  state.probe = RestartProbe(state.probe);
  if (mode == Mode::kSecondOrder) state.trend = BeginPhase(state.trend, state.last_step);
}

// Applies the decision that Decide returns for `state`.
FallbackState Settled(const FallbackConfig& config, FallbackState state) {
  const Mode mode = PolicyMode(config, state);
  if (mode == state.mode) return state;
  if (mode == Mode::kSecondOrder) ++state.reentries;
  MoveTo(mode, state);
  return state;
}

double Smoothed(const FallbackConfig& config, double before, double now) {
  return before == 0 ? now : config.loss_decay * before + (1 - config.loss_decay) * now;
}

void TakeSeconds(const FallbackConfig& config, const StepObservation& observation, FallbackState& state) {
  if (!std::isfinite(observation.seconds) || observation.seconds <= 0) return;
  double& seconds = observation.mode == Mode::kSecondOrder ? state.second_order_seconds : state.first_order_seconds;
  seconds = Smoothed(config, seconds, observation.seconds);
}

void TakeProbeStep(const FallbackConfig& config, const StepObservation& observation, FallbackState& state) {
  if (state.trend.phase_steps == 0) {  // windows of different phases are not comparable
    state.probe = RestartProbe(state.probe);
    return;
  }
  state.probe = AdvanceProbe(config, state.probe,
                             {.loss = observation.loss,
                              .seconds = observation.seconds,
                              .mode = observation.mode,
                              .may_begin = HasMinSteps(config, state)});
}

}  // namespace

FallbackState Advance(const FallbackConfig& config, const FallbackState& state, const StepObservation& observation) {
  if (state.observed && observation.step <= state.last_step) return state;
  FallbackState next = Settled(config, state);
  next.observed = true;
  next.last_step = observation.step;
  std::optional<LossTrend> trend;
  if (!observation.skipped) {
    trend = AdvanceTrend(config, next.trend, observation.step, observation.loss, observation.learning_rate);
  }
  if (!trend) {
    ++next.uncounted_steps;
    return next;
  }
  next.trend = *trend;
  TakeSeconds(config, observation, next);
  if (next.forced || !HasRule(config)) return next;
  // Steps granted before a change of mode still run in the old mode and say nothing about the new one.
  if (observation.mode == next.mode) {
    next.streak_steps = IndicatesChange(config, next) ? next.streak_steps + 1 : 0;
  }
  if (config.policy == FallbackPolicy::kCostAware && next.mode == Mode::kSecondOrder) {
    TakeProbeStep(config, observation, next);
  }
  return next;
}

FallbackState Force(const FallbackConfig& config, const FallbackState& state, std::optional<Mode> mode) {
  if (mode == state.forced) return state;
  FallbackState next = Settled(config, state);
  next.streak_steps = 0;
  next.probe = RestartProbe(next.probe);
  if (!mode) MoveTo(*state.forced, next);
  next.forced = mode;
  return next;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/policy/fallback.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace precondor {

Mode ModeAt(absl::Span<const ModeInterval> schedule, uint64_t step) {
  Mode mode = Mode::kSecondOrder;
  for (const ModeInterval& interval : schedule) {
    if (interval.first_step > step) break;
    mode = interval.mode;
  }
  return mode;
}

std::vector<ModeInterval> ModesBetween(absl::Span<const ModeInterval> schedule, uint64_t from_step,
                                       uint64_t through_step) {
  std::vector<ModeInterval> modes = {{from_step, ModeAt(schedule, from_step)}};
  for (const ModeInterval& interval : schedule) {
    if (interval.first_step <= from_step) continue;
    if (interval.first_step > through_step) break;
    if (interval.mode != modes.back().mode) modes.push_back(interval);
  }
  return modes;
}

namespace {

// Tolerance for rounding in a schedule computed in f64. A warm-up of fewer than 1e9 steps rises by more than this per
// step.
constexpr double kRising = 1e-9;

bool BeginsPhase(const FallbackConfig& config, double before, double now) {
  if (before == 0) return false;  // the first known learning rate
  return now > before * (1 + kRising) || std::abs(now - before) > config.lr_jump * std::max(now, before);
}

// Returns the rate that the smoothed rate is compared with.
double ThresholdRate(const FallbackConfig& config, const FallbackState& state) {
  return config.beta * PhaseMeanRate(state.trend);
}

bool HasMinSteps(const FallbackConfig& config, const FallbackState& state) {
  return state.trend.started && state.trend.phase_steps >= static_cast<uint64_t>(config.min_steps);
}

bool IsSlow(const FallbackConfig& config, const FallbackState& state) {
  return state.mode == Mode::kSecondOrder && HasMinSteps(config, state) &&
         state.trend.rate < ThresholdRate(config, state);
}

// Returns the mode that the policy selects, ignoring a forced mode. While a mode is forced, no step counts towards a
// change, so this mode does not change.
Mode PolicyMode(const FallbackConfig& config, const FallbackState& state) {
  const bool falls_back = config.policy == FallbackPolicy::kLossRate && state.streak_steps >= config.patience_steps;
  return falls_back ? Mode::kFirstOrder : state.mode;
}

void MoveTo(Mode mode, FallbackState& state) {
  state.mode = mode;
  state.switch_step = state.last_step;
  state.streak_steps = 0;
  if (mode == Mode::kSecondOrder) state.trend = BeginPhase(state.trend, state.last_step);
}

// Applies the decision that Decide returns for `state`.
FallbackState Settled(const FallbackConfig& config, FallbackState state) {
  const Mode mode = PolicyMode(config, state);
  if (mode != state.mode) MoveTo(mode, state);
  return state;
}

void TakeSeconds(const StepObservation& observation, FallbackState& state) {
  if (!std::isfinite(observation.seconds) || observation.seconds <= 0) return;
  double& seconds = observation.mode == Mode::kSecondOrder ? state.second_order_seconds : state.first_order_seconds;
  seconds = seconds == 0 ? observation.seconds : kLossDecay * seconds + (1 - kLossDecay) * observation.seconds;
}

FallbackReason Reason(const FallbackConfig& config, const FallbackState& state, Mode mode) {
  if (state.forced) return FallbackReason::kForced;
  if (config.policy == FallbackPolicy::kNever) return FallbackReason::kNever;
  if (config.policy == FallbackPolicy::kAtStep) return FallbackReason::kAtStep;
  if (state.mode == Mode::kFirstOrder) return FallbackReason::kStaysFirstOrder;
  if (mode == Mode::kFirstOrder) return FallbackReason::kLossRate;
  if (!HasMinSteps(config, state)) return FallbackReason::kTooEarly;
  return state.streak_steps > 0 ? FallbackReason::kSlow : FallbackReason::kStillFalling;
}

std::string Trend(const FallbackState& state) {
  return absl::StrCat("at step ", state.last_step, " the smoothed loss ", state.trend.loss, " falls by ",
                      state.trend.rate, " a step, ");
}

std::string Against(const LossTrend& trend, double threshold_rate) {
  return absl::StrCat(threshold_rate, " (the mean since step ", trend.phase_step, " is ", PhaseMeanRate(trend), ")");
}

std::string Sentence(const FallbackConfig& config, const FallbackState& state, FallbackReason reason,
                     double threshold_rate) {
  switch (reason) {
    case FallbackReason::kNever:
      return "second order: the policy is NEVER";
    case FallbackReason::kAtStep:
      return absl::StrCat("first order from step ", *config.at_step, " on: the policy is AT_STEP");
    case FallbackReason::kForced:
      return absl::StrCat(ModeName(*state.forced), " is forced by an operator");
    case FallbackReason::kTooEarly:
      return absl::StrCat("second order: ", state.trend.phase_steps, " of ", config.min_steps,
                          " steps counted since step ", state.trend.phase_step);
    case FallbackReason::kStillFalling:
      return absl::StrCat("second order: ", Trend(state), "not less than ", Against(state.trend, threshold_rate));
    case FallbackReason::kSlow:
      return absl::StrCat("second order: ", Trend(state), "less than ", Against(state.trend, threshold_rate), ", for ",
                          state.streak_steps, " of ", config.patience_steps, " steps");
    case FallbackReason::kLossRate:
      return absl::StrCat("falls back to first order: ", Trend(state), "less than ",
                          Against(state.trend, threshold_rate), ", for ", state.streak_steps, " steps");
    case FallbackReason::kStaysFirstOrder:
      return absl::StrCat("first order since step ", state.switch_step);
  }
  return "";
}

}  // namespace

std::optional<LossTrend> AdvanceTrend(const FallbackConfig& config, const LossTrend& trend, uint64_t step, double loss,
                                      double learning_rate) {
  LossTrend next = trend;
  if (trend.started) {
    next.loss = kLossDecay * trend.loss + (1 - kLossDecay) * loss;
    next.rate = config.rate_decay * trend.rate + (1 - config.rate_decay) * (trend.loss - next.loss);
    ++next.phase_steps;
  } else {
    next.started = true;
    next.loss = loss;
    next = BeginPhase(next, step);
  }
  if (std::isfinite(learning_rate) && learning_rate > 0) {
    if (BeginsPhase(config, trend.learning_rate, learning_rate)) next = BeginPhase(next, step);
    next.learning_rate = learning_rate;
  }
  const bool finite = std::isfinite(next.loss) && std::isfinite(next.rate) && std::isfinite(PhaseDecrease(next));
  return finite ? std::make_optional(next) : std::nullopt;
}

LossTrend BeginPhase(const LossTrend& trend, uint64_t step) {
  LossTrend next = trend;
  next.phase_step = step;
  next.phase_loss = trend.loss;
  next.phase_steps = 0;
  return next;
}

double PhaseDecrease(const LossTrend& trend) { return trend.phase_loss - trend.loss; }

double PhaseMeanRate(const LossTrend& trend) {
  return trend.phase_steps == 0 ? 0 : PhaseDecrease(trend) / static_cast<double>(trend.phase_steps);
}

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
  TakeSeconds(observation, next);
  if (next.forced || config.policy != FallbackPolicy::kLossRate) return next;
  // Steps granted before a change of mode still run in the old mode and say nothing about the new one.
  if (observation.mode == next.mode) next.streak_steps = IsSlow(config, next) ? next.streak_steps + 1 : 0;
  return next;
}

FallbackState Force(const FallbackConfig& config, const FallbackState& state, std::optional<Mode> mode) {
  if (mode == state.forced) return state;
  FallbackState next = Settled(config, state);
  next.streak_steps = 0;
  if (!mode) MoveTo(*state.forced, next);
  next.forced = mode;
  return next;
}

FallbackDecision Decide(const FallbackConfig& config, const FallbackState& state) {
  FallbackDecision decision;
  decision.state = state;
  decision.threshold_rate = ThresholdRate(config, state);
  const Mode policy_mode = PolicyMode(config, state);
  decision.reason = Reason(config, state, policy_mode);
  decision.mode = policy_mode;
  if (decision.reason == FallbackReason::kForced) decision.mode = *state.forced;
  if (decision.reason == FallbackReason::kNever) decision.mode = Mode::kSecondOrder;
  if (decision.reason == FallbackReason::kAtStep) {
    decision.mode = Mode::kFirstOrder;
    decision.from_step = *config.at_step;
  }
  decision.sentence = Sentence(config, state, decision.reason, decision.threshold_rate);
  return decision;
}

std::vector<ModeInterval> ApplyDecision(const FallbackDecision& decision, absl::Span<const ModeInterval> schedule,
                                        uint64_t first_open_step) {
  std::vector<ModeInterval> carried;
  const auto append = [&carried](uint64_t step, Mode mode) {
    if (carried.empty() || carried.back().mode != mode) carried.push_back({step, mode});
  };
  if (schedule.empty() && first_open_step > 0) append(0, Mode::kSecondOrder);
  for (const ModeInterval& interval : schedule) {
    if (interval.first_step < first_open_step) append(interval.first_step, interval.mode);
  }
  if (decision.from_step > first_open_step) append(first_open_step, Mode::kSecondOrder);
  append(std::max(decision.from_step, first_open_step), decision.mode);
  return carried;
}

absl::string_view FallbackReasonName(FallbackReason reason) {
  switch (reason) {
    case FallbackReason::kNever:
      return "NEVER";
    case FallbackReason::kAtStep:
      return "AT_STEP";
    case FallbackReason::kForced:
      return "FORCED";
    case FallbackReason::kTooEarly:
      return "TOO_EARLY";
    case FallbackReason::kStillFalling:
      return "STILL_FALLING";
    case FallbackReason::kSlow:
      return "SLOW";
    case FallbackReason::kLossRate:
      return "LOSS_RATE";
    case FallbackReason::kStaysFirstOrder:
      return "STAYS_FIRST_ORDER";
  }
  return "UNKNOWN";
}

}  // namespace precondor

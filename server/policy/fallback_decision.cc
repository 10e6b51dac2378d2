// SPDX-License-Identifier: Apache-2.0
// Makes and applies decisions. The comparisons are in fallback_rules.cc.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "server/policy/fallback.h"
#include "server/policy/fallback_rules.h"

namespace precondor {
namespace {

using fallback_rules::HasMinSteps;
using fallback_rules::PolicyMode;

FallbackInputs Inputs(const FallbackConfig& config, const FallbackState& state) {
  return {.step = state.last_step,
          .uncounted_steps = state.uncounted_steps,
          .loss = state.trend.loss,
          .rate = state.trend.rate,
          .phase_step = state.trend.phase_step,
          .phase_steps = state.trend.phase_steps,
          .phase_loss = state.trend.phase_loss,
          .phase_decrease = PhaseDecrease(state.trend),
          .phase_mean_rate = PhaseMeanRate(state.trend),
          .threshold_rate = fallback_rules::ThresholdRate(config, state),
          .learning_rate = state.trend.learning_rate,
          .streak_steps = state.streak_steps,
          .second_order_seconds = state.second_order_seconds,
          .first_order_seconds = state.first_order_seconds,
          .probe_phase = state.probe.phase,
          .probe_rounds = state.probe.rounds,
          .probe_wins = state.probe.wins,
          .second_order_per_second = state.probe.second_order_per_second,
          .first_order_per_second = state.probe.first_order_per_second,
          .policy_mode = state.mode,
          .switch_step = state.switch_step,
          .reentries = state.reentries};
}

FallbackReason SecondOrderReason(const FallbackConfig& config, const FallbackState& state, Mode mode) {
  const bool by_cost = config.policy == FallbackPolicy::kCostAware;
  if (mode == Mode::kFirstOrder) return by_cost ? FallbackReason::kFirstOrderPays : FallbackReason::kLossRate;
  if (by_cost && ProbeMode(state.probe.phase) == Mode::kFirstOrder) return FallbackReason::kProbing;
  if (!HasMinSteps(config, state)) return FallbackReason::kTooEarly;
  if (!by_cost) return state.streak_steps > 0 ? FallbackReason::kSlow : FallbackReason::kStillFalling;
  return state.probe.phase == ProbePhase::kWaiting ? FallbackReason::kBetweenRounds : FallbackReason::kMeasuring;
}

FallbackReason Reason(const FallbackConfig& config, const FallbackState& state, Mode mode) {
  if (state.forced) return FallbackReason::kForced;
  if (config.policy == FallbackPolicy::kNever) return FallbackReason::kNever;
  if (config.policy == FallbackPolicy::kAtStep) return FallbackReason::kAtStep;
  if (state.mode == Mode::kSecondOrder) return SecondOrderReason(config, state, mode);
  return mode == Mode::kSecondOrder ? FallbackReason::kReentry : FallbackReason::kStaysFirstOrder;
}

std::string Trend(const FallbackInputs& in) {
  return absl::StrCat("at step ", in.step, " the smoothed loss ", in.loss, " falls by ", in.rate, " a step, ");
}

std::string Against(const FallbackInputs& in) {
  return absl::StrCat(in.threshold_rate, " (the mean since step ", in.phase_step, " is ", in.phase_mean_rate, ")");
}

std::string LastRound(const FallbackInputs& in) {
  return absl::StrCat("in round ", in.probe_rounds, " first order lowered the loss by ", in.first_order_per_second,
                      " a second, second order by ", in.second_order_per_second);
}

std::string Sentence(const FallbackConfig& config, const FallbackState& state, FallbackReason reason,
                     const FallbackInputs& in) {
  switch (reason) {
    case FallbackReason::kNever:
      return "second order: the policy is NEVER";
    case FallbackReason::kAtStep:
      return absl::StrCat("first order from step ", *config.at_step, " on: the policy is AT_STEP");
    case FallbackReason::kForced:
      return absl::StrCat(ModeName(*state.forced), " is forced by an operator");
    case FallbackReason::kTooEarly:
      return absl::StrCat("second order: ", in.phase_steps, " of ", config.min_steps, " steps counted since step ",
                          in.phase_step);
    case FallbackReason::kStillFalling:
      return absl::StrCat("second order: ", Trend(in), "not less than ", Against(in));
    case FallbackReason::kSlow:
      return absl::StrCat("second order: ", Trend(in), "less than ", Against(in), ", for ", in.streak_steps, " of ",
                          config.patience_steps, " steps");
    case FallbackReason::kLossRate:
      return absl::StrCat("falls back to first order: ", Trend(in), "less than ", Against(in), ", for ",
                          in.streak_steps, " steps");
    case FallbackReason::kBetweenRounds:
      return absl::StrCat("second order: next round after ", config.probe_interval_steps, " steps, ", state.probe.steps,
                          " are over; ", in.probe_rounds == 0 ? "none was finished" : LastRound(in));
    case FallbackReason::kMeasuring:
      return absl::StrCat("second order: measuring round ", in.probe_rounds + 1, ", ", ProbePhaseName(in.probe_phase));
    case FallbackReason::kProbing:
      return absl::StrCat("first order for a probe: measuring round ", in.probe_rounds + 1, ", ",
                          ProbePhaseName(in.probe_phase));
    case FallbackReason::kFirstOrderPays:
      return absl::StrCat("falls back to first order: ", LastRound(in), "; that is ", in.probe_wins,
                          " rounds in a row by more than ", config.probe_margin, " of it");
    case FallbackReason::kStaysFirstOrder:
      return absl::StrCat("first order since step ", in.switch_step, config.reentry ? ": " : ": re-entry is off",
                          config.reentry
                              ? absl::StrCat("progress for ", in.streak_steps, " of ", config.patience_steps,
                                             " steps after a stay of ", fallback_rules::RequiredStay(config, state))
                              : "");
    case FallbackReason::kReentry:
      return absl::StrCat("back to second order: ", Trend(in), "at least ", Against(in), ", for ", in.streak_steps,
                          " steps");
  }
  return "";
}

}  // namespace

FallbackDecision Decide(const FallbackConfig& config, const FallbackState& state) {
  FallbackDecision decision;
  decision.inputs = Inputs(config, state);
  const Mode policy_mode = PolicyMode(config, state);
  decision.reason = Reason(config, state, policy_mode);
  decision.mode = policy_mode;
  if (decision.reason == FallbackReason::kForced) decision.mode = *state.forced;
  if (decision.reason == FallbackReason::kNever) decision.mode = Mode::kSecondOrder;
  if (decision.reason == FallbackReason::kAtStep) {
    decision.mode = Mode::kFirstOrder;
    decision.from_step = *config.at_step;
  }
  if (decision.reason == FallbackReason::kProbing) {
    decision.mode = Mode::kFirstOrder;
    decision.probe = true;
  }
  decision.sentence = Sentence(config, state, decision.reason, decision.inputs);
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
    case FallbackReason::kBetweenRounds:
      return "BETWEEN_ROUNDS";
    case FallbackReason::kMeasuring:
      return "MEASURING";
    case FallbackReason::kProbing:
      return "PROBING";
    case FallbackReason::kFirstOrderPays:
      return "FIRST_ORDER_PAYS";
    case FallbackReason::kStaysFirstOrder:
      return "STAYS_FIRST_ORDER";
    case FallbackReason::kReentry:
      return "REENTRY";
  }
  return "UNKNOWN";
}

}  // namespace precondor

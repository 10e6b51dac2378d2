// SPDX-License-Identifier: Apache-2.0
// MKOR-H: whether a session goes on in second order, and why. Source: ours; docs/methods/mkor_h.md.
// The coordinator keeps a FallbackState for each session, advances it with every step that all ranks have reported, and
// asks for a decision after each. Values and pure functions without a clock: the same observations in the same order
// give the same bits, so a log of them can be replayed. Configs are valid (ValidateFallbackConfig).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/fallback_config.h"
#include "kernels/base/session_spec.h"
#include "server/policy/cost_probe.h"
#include "server/policy/lease.h"
#include "server/policy/loss_trend.h"

namespace precondor {

// One finished step of the session. A step is counted when its loss is finite and it was not skipped; another one moves
// nothing but last_step and uncounted_steps.
struct StepObservation {
  uint64_t step = 0;
  double loss = 0;                 // sample-weighted over the ranks whose loss was finite
  double learning_rate = 0;        // 0: not known
  double seconds = 0;              // wall time of the step; 0: not known
  Mode mode = Mode::kSecondOrder;  // that it ran in
  bool skipped = false;            // AMP
};

struct FallbackState {
  bool observed = false;   // last_step means something
  uint64_t last_step = 0;  // the greatest step taken in
  uint64_t uncounted_steps = 0;
  LossTrend trend;
  CostProbe probe;
  double second_order_seconds = 0;  // smoothed seconds a step in each mode (loss_decay); 0: none yet
  double first_order_seconds = 0;
  int32_t streak_steps = 0;  // counted steps in a row, up to the last, that spoke for leaving `mode`
  // Where the policy stands. A decision to leave it becomes part of the state with the next step.
  Mode mode = Mode::kSecondOrder;
  uint64_t switch_step = 0;  // last_step when it last changed
  uint32_t reentries = 0;
  std::optional<Mode> forced = std::nullopt;  // by an operator
  bool operator==(const FallbackState&) const = default;
};

// Stable numbers, for logs.
enum class FallbackReason : uint8_t {
  kNever = 1,             // NEVER
  kAtStep = 2,            // AT_STEP
  kForced = 3,            // an operator's choice
  kTooEarly = 4,          // fewer than min_steps in this phase
  kStillFalling = 5,      // LOSS_RATE: second order, the loss falls fast enough
  kSlow = 6,              // LOSS_RATE: second order, slow for less than patience_steps
  kLossRate = 7,          // LOSS_RATE: falls back
  kBetweenRounds = 8,     // COST_AWARE: second order, no measurement under way
  kMeasuring = 9,         // COST_AWARE: second order, in a round
  kProbing = 10,          // COST_AWARE: first order for a probe
  kFirstOrderPays = 11,   // COST_AWARE: falls back
  kStaysFirstOrder = 12,  // after a fallback
  kReentry = 13,          // goes back to second order
};

// What a decision was made from, for the audit log and metrics. Units as in FallbackState.
struct FallbackInputs {
  uint64_t step = 0;  // the last one taken in
  uint64_t uncounted_steps = 0;
  double loss = 0;
  double rate = 0;
  uint64_t phase_step = 0;
  uint64_t phase_steps = 0;
  double phase_loss = 0;
  double phase_decrease = 0;
  double phase_mean_rate = 0;
  double threshold_rate = 0;  // that `rate` is compared with: beta or, in first order, reentry_beta times the mean
  double learning_rate = 0;
  int32_t streak_steps = 0;
  double second_order_seconds = 0;
  double first_order_seconds = 0;
  ProbePhase probe_phase = ProbePhase::kWaiting;
  int64_t probe_rounds = 0;
  int64_t probe_wins = 0;
  double second_order_per_second = 0;  // decrease of the loss, last round
  double first_order_per_second = 0;
  Mode policy_mode = Mode::kSecondOrder;  // before this decision
  uint64_t switch_step = 0;
  uint32_t reentries = 0;
  bool operator==(const FallbackInputs&) const = default;
};

struct FallbackDecision {
  Mode mode = Mode::kSecondOrder;
  // The mode holds from this step, or from the first one not granted yet if that is later; second order before.
  uint64_t from_step = 0;
  bool probe = false;  // first order for a probe only: factors have to be kept
  FallbackReason reason = FallbackReason::kNever;
  std::string sentence;  // for people, with the numbers
  FallbackInputs inputs;
  bool operator==(const FallbackDecision&) const = default;
};

// Takes a step in. A step that is not greater than the last one, be it a repetition, out of order or of a trainer that
// has gone back, is ignored: the state comes back as it was. So each step counts once at most.
FallbackState Advance(const FallbackConfig& config, const FallbackState& state, const StepObservation& observation);

FallbackDecision Decide(const FallbackConfig& config, const FallbackState& state);

// An operator's choice, which goes before every policy; nullopt ends it, and the policy goes on from the mode that was
// forced (AT_STEP and NEVER: from their own). The state goes on taking steps in meanwhile, but nothing speaks for a
// change.
FallbackState Force(const FallbackConfig& config, const FallbackState& state, std::optional<Mode> mode);

// `schedule` (server/policy/lease.h) with a decision carried out; steps before `first_open_step` keep their modes.
// Carrying the same decision out again changes nothing.
std::vector<ModeInterval> CarryOut(const FallbackDecision& decision, absl::Span<const ModeInterval> schedule,
                                   uint64_t first_open_step);

// "NEVER", "LOSS_RATE" ...: the enumerator's name in capitals.
absl::string_view FallbackReasonName(FallbackReason reason);

}  // namespace precondor

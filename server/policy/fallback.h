// SPDX-License-Identifier: Apache-2.0
// MKOR-H: decides whether a session stays in second order, and why. Source: ours; docs/use/methods/mkor_h.md.
// The coordinator keeps a FallbackState for each session, advances it with every step that all ranks have reported, and
// asks for a decision after each. Values and pure functions without a clock: equal observations in equal order give the
// same bits, so a log of them can be replayed. Configs must be valid (ValidateFallbackConfig).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// Consecutive steps with one mode: from first_step to the step before the next interval.
struct ModeInterval {
  uint64_t first_step = 0;
  Mode mode = Mode::kSecondOrder;
  bool operator==(const ModeInterval&) const = default;
};

// Returns the mode of `step`. `schedule` ascends by first_step, and its first interval begins at 0. An empty schedule
// means second order.
Mode ModeAt(absl::Span<const ModeInterval> schedule, uint64_t step);

// Returns the part of the schedule that covers [from_step, through_step]. Its first interval begins at from_step.
std::vector<ModeInterval> ModesBetween(absl::Span<const ModeInterval> schedule, uint64_t from_step,
                                       uint64_t through_step);

inline constexpr double kLossDecay = 0.95;  // weight of the past in smoothed losses

// A phase begins with the first step, at each step at which the learning rate rises, and where it changes abruptly.
// Units: loss, and loss per step.
struct LossTrend {
  bool started = false;      // false until a step was counted; the other fields are then undefined
  double loss = 0;           // l: exponential mean of the losses
  double rate = 0;           // r: exponential mean of l's decrease per step; positive while the loss decreases
  double learning_rate = 0;  // of the last step with a known one; 0 means none yet
  uint64_t phase_step = 0;   // t0: step at which the phase began
  double phase_loss = 0;     // l(t0): smoothed loss at that step
  uint64_t phase_steps = 0;  // number of steps counted since t0
  bool operator==(const LossTrend&) const = default;
};

// Returns the trend after a step, or nullopt if the loss is not finite or a sum would exceed f64's range. A learning
// rate that is not finite and positive counts as unknown. While the learning rate rises, every step begins a phase.
std::optional<LossTrend> AdvanceTrend(const FallbackConfig& config, const LossTrend& trend, uint64_t step, double loss,
                                      double learning_rate);

// Returns `trend` with a phase that begins at `step`.
LossTrend BeginPhase(const LossTrend& trend, uint64_t step);

// Returns the decrease of the smoothed loss since t0: l(t0) - l.
double PhaseDecrease(const LossTrend& trend);

// Returns the mean decrease per counted step since t0; 0 if no step was counted.
double PhaseMeanRate(const LossTrend& trend);

// One finished step of the session. A step is counted if its loss is finite and it was not skipped. Other steps change
// only last_step and uncounted_steps.
struct StepObservation {
  uint64_t step = 0;
  double loss = 0;                 // sample-weighted mean over the ranks whose loss was finite
  double learning_rate = 0;        // 0 means unknown
  double seconds = 0;              // wall time of the step; 0 means unknown
  Mode mode = Mode::kSecondOrder;  // mode in which the step ran
  bool skipped = false;            // skipped by AMP
};

struct FallbackState {
  bool observed = false;   // false until a step was observed; last_step is then undefined
  uint64_t last_step = 0;  // greatest step observed
  uint64_t uncounted_steps = 0;
  LossTrend trend;
  double second_order_seconds = 0;  // smoothed seconds per step in each mode (kLossDecay); 0 means none yet
  double first_order_seconds = 0;
  int32_t streak_steps = 0;  // consecutive counted steps, up to the last one, that were slow
  // The policy's current mode. A decision to fall back enters the state with the next step.
  Mode mode = Mode::kSecondOrder;
  uint64_t switch_step = 0;                   // last_step when `mode` last changed
  std::optional<Mode> forced = std::nullopt;  // mode that an operator has forced
  bool operator==(const FallbackState&) const = default;
};

// Stable numbers for logs. Numbers that are missing were those of earlier policies.
enum class FallbackReason : uint8_t {
  kNever = 1,             // policy NEVER
  kAtStep = 2,            // policy AT_STEP
  kForced = 3,            // an operator has forced the mode
  kTooEarly = 4,          // fewer than min_steps in this phase
  kStillFalling = 5,      // LOSS_RATE: stays in second order, the loss decreases fast enough
  kSlow = 6,              // LOSS_RATE: stays in second order, slow for fewer than patience_steps
  kLossRate = 7,          // LOSS_RATE: falls back
  kStaysFirstOrder = 12,  // after a fallback
};

struct FallbackDecision {
  Mode mode = Mode::kSecondOrder;
  // First step of `mode`, or the first step not granted yet if that is later. Steps before it are in second order.
  uint64_t from_step = 0;
  FallbackReason reason = FallbackReason::kNever;
  std::string sentence;       // explanation with the numbers
  FallbackState state;        // the decision is made from it; for the audit log and metrics
  double threshold_rate = 0;  // state.trend.rate is compared with it: beta times the mean
  bool operator==(const FallbackDecision&) const = default;
};

// Returns the state after a step. A step that is not greater than the last one is ignored (a repetition, out of order,
// or a trainer that has rolled back), so that each step counts at most once.
FallbackState Advance(const FallbackConfig& config, const FallbackState& state, const StepObservation& observation);

FallbackDecision Decide(const FallbackConfig& config, const FallbackState& state);

// Forces a mode, which overrides every policy. nullopt ends this. Then LOSS_RATE continues from the forced mode,
// AT_STEP and NEVER from their own. While a mode is forced, the state still takes in steps, but none
// indicates a change.
FallbackState Force(const FallbackConfig& config, const FallbackState& state, std::optional<Mode> mode);

// Returns `schedule` with a decision applied. Steps before `first_open_step` keep their modes.
// Applying a decision again changes nothing.
std::vector<ModeInterval> ApplyDecision(const FallbackDecision& decision, absl::Span<const ModeInterval> schedule,
                                        uint64_t first_open_step);

// Returns the enumerator's name in capitals: "NEVER", "LOSS_RATE", ...
absl::string_view FallbackReasonName(FallbackReason reason);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Computes the smoothed loss of a session, its decrease per step, and the phases of the learning rate. Source: ours;
// docs/use/methods/mkor_h.md. Values and pure functions; equal inputs give the same bits.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/base/session_spec.h"

namespace precondor {

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

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The smoothed loss of a session, how fast it decreases, and since when the learning rate has been what it is.
// Source: ours; docs/methods/mkor_h.md. Values and pure functions; the same inputs give the same bits.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/base/fallback_config.h"

namespace precondor {

// A phase begins with the first step, where warm-up ends, and where the learning rate jumps. Units: loss, and loss a
// step.
struct LossTrend {
  bool started = false;      // false: no step has been counted, and nothing below means anything
  double loss = 0;           // l: exponential mean of the losses
  double rate = 0;           // r: exponential mean of l's decrease a step; positive while the loss falls
  double learning_rate = 0;  // of the last step that had one; 0: none yet
  uint64_t phase_step = 0;   // t0
  double phase_loss = 0;     // l(t0)
  uint64_t phase_steps = 0;  // steps counted since t0: t - t0, where none is left out
  bool operator==(const LossTrend&) const = default;
};

// Takes a step in; nullopt for a loss that is not finite or would take a sum out of f64's range. A learning rate that
// is not finite and positive is one that is not known. While the learning rate rises every step begins a phase.
std::optional<LossTrend> AdvanceTrend(const FallbackConfig& config, const LossTrend& trend, uint64_t step, double loss,
                                      double learning_rate);

// `trend` with a phase that begins at `step`.
LossTrend BeginPhase(const LossTrend& trend, uint64_t step);

// Decrease of the smoothed loss since t0: l(t0) - l.
double PhaseDecrease(const LossTrend& trend);

// The same a step; 0 where none has been counted.
double PhaseMeanRate(const LossTrend& trend);

}  // namespace precondor

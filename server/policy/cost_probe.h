// SPDX-License-Identifier: Apache-2.0
// What second order earns per second by comparison with first order, measured in rounds of three windows: second order,
// first order, second order. Source: ours; docs/methods/mkor_h.md. Values and pure functions; the same inputs give the
// same bits.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

#include "kernels/base/fallback_config.h"
#include "kernels/base/session_spec.h"

namespace precondor {

// Sums for the least-squares line through the losses of consecutive counted steps, and the time they took.
struct LossWindow {
  int64_t steps = 0;
  double first_loss = 0;  // the sums are of losses less this one, so that little is cancelled
  double loss_sum = 0;
  double indexed_loss_sum = 0;  // each times its place in the window, 0 ... steps - 1
  double seconds = 0;
  bool operator==(const LossWindow&) const = default;
};

LossWindow ExtendWindow(const LossWindow& window, double loss, double seconds);

// Decrease of the loss per second: the line's slope a step, negated, over the mean seconds a step. At least 2 steps.
double DecreasePerSecond(const LossWindow& window);

enum class ProbePhase : uint8_t {
  kWaiting = 1,        // between rounds, in second order
  kBefore = 2,         // the first window
  kToFirstOrder = 3,   // until the first steps in first order are over
  kProbe = 4,          // the second window
  kToSecondOrder = 5,  // until the first steps in second order are over
  kAfter = 6,          // the third window
};

struct CostProbe {
  ProbePhase phase = ProbePhase::kWaiting;
  int64_t steps = 0;  // kWaiting: counted; kTo...: in the new mode; windows: those without a usable time
  LossWindow before, probe, after;
  int64_t rounds = 0;                  // finished ones
  int64_t wins = 0;                    // of first order in a row, up to the last round
  double second_order_per_second = 0;  // of the last round: the mean of its first and third window
  double first_order_per_second = 0;   // of its second
  bool operator==(const CostProbe&) const = default;
};

struct ProbeStep {
  double loss = 0;                 // finite
  double seconds = 0;              // the step took; a step is not measured where this is not finite and positive
  Mode mode = Mode::kSecondOrder;  // it ran in
  bool may_begin = false;          // a round
};

// Takes a step in. A step of a window in another mode than the window's ends the round without a result; so do
// `probe_steps` steps of one window without a usable time.
CostProbe AdvanceProbe(const FallbackConfig& config, const CostProbe& probe, const ProbeStep& step);

// The wait before a first round begins anew: nothing is won. The last round's numbers stay.
CostProbe RestartProbe(const CostProbe& probe);

// The mode that a phase asks for.
Mode ProbeMode(ProbePhase phase);

// "WAITING", "BEFORE", "TO_FIRST_ORDER", "PROBE", "TO_SECOND_ORDER", "AFTER".
absl::string_view ProbePhaseName(ProbePhase phase);

}  // namespace precondor

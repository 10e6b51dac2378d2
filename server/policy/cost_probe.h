// SPDX-License-Identifier: Apache-2.0
// Compares the decrease of the loss per second in second order with that in first order. It is measured in rounds of
// three windows: second order, first order, second order. Source: ours; docs/use/methods/mkor_h.md. Values and pure
// functions; equal inputs give the same bits.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

#include "kernels/base/fallback_config.h"
#include "kernels/base/session_spec.h"

namespace precondor {

// Sums for the least-squares line through the losses of consecutive counted steps, and the duration of these steps.
struct LossWindow {
  int64_t steps = 0;
  double first_loss = 0;  // subtracted from each loss in the sums, to avoid cancellation
  double loss_sum = 0;
  double indexed_loss_sum = 0;  // sum of losses times index in the window, 0 ... steps - 1
  double seconds = 0;
  bool operator==(const LossWindow&) const = default;
};

LossWindow ExtendWindow(const LossWindow& window, double loss, double seconds);

// Returns the decrease of the loss per second: the negated slope per step divided by the mean seconds per step.
// Precondition: the window has at least 2 steps.
double DecreasePerSecond(const LossWindow& window);

enum class ProbePhase : uint8_t {
  kWaiting = 1,        // between rounds, in second order
  kBefore = 2,         // the first window
  kToFirstOrder = 3,   // until probe_settle_steps steps in first order have passed
  kProbe = 4,          // the second window
  kToSecondOrder = 5,  // until probe_settle_steps steps in second order have passed
  kAfter = 6,          // the third window
};

struct CostProbe {
  ProbePhase phase = ProbePhase::kWaiting;
  int64_t steps = 0;  // kWaiting: counted; kTo...: in the new mode; windows: without a usable duration
  LossWindow before, probe, after;
  int64_t rounds = 0;                  // number of finished rounds
  int64_t wins = 0;                    // number of consecutive rounds, up to the last one, that first order has won
  double second_order_per_second = 0;  // in the last round: the mean of its first and third window
  double first_order_per_second = 0;   // in the last round: its second window
  bool operator==(const CostProbe&) const = default;
};

struct ProbeStep {
  double loss = 0;                 // finite
  double seconds = 0;              // duration of the step; the step is not measured unless this is finite and positive
  Mode mode = Mode::kSecondOrder;  // mode in which the step ran
  bool may_begin = false;          // whether a round may begin with this step
};

// Returns the state after a step. A round ends without a result if a step of a window runs in another mode than the
// window's, or if `probe_steps` steps of one window have no usable duration.
CostProbe AdvanceProbe(const FallbackConfig& config, const CostProbe& probe, const ProbeStep& step);

// Returns a state in which the wait before a round and the number of wins start again. The last round's numbers stay.
CostProbe RestartProbe(const CostProbe& probe);

// Returns the mode in which the steps of a phase should run.
Mode ProbeMode(ProbePhase phase);

// "WAITING", "BEFORE", "TO_FIRST_ORDER", "PROBE", "TO_SECOND_ORDER", "AFTER".
absl::string_view ProbePhaseName(ProbePhase phase);

}  // namespace precondor

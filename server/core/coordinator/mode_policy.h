// SPDX-License-Identifier: Apache-2.0
// The mode that a session should have: the state of its fallback policy and the last decision.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/base/session_spec.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"

namespace precondor {

// Runs ahead of the durable state: a decision takes effect once StepLeases has it in a durable lease. Not thread-safe.
class ModePolicy {
 public:
  ModePolicy(FallbackConfig config, FallbackState state);

  void Observe(const StepObservation& finished);
  // Sets the mode for an operator; nullopt returns the choice to the policy.
  void Force(std::optional<Mode> mode);
  // Prevents a return to second order before all ranks have reported the steps below `step`.
  void StayInFirstOrderUntil(uint64_t step) { stay_until_ = step; }

  const FallbackState& state() const { return state_; }
  const FallbackDecision& decision() const { return decision_; }
  // Returns `schedule` with the decision applied from `first_open_step`, the first step that has not been granted to
  // any rank. `open_from`: see StepProgress.
  std::vector<ModeInterval> WantedSchedule(const std::vector<ModeInterval>& schedule, uint64_t first_open_step,
                                           uint64_t open_from) const;

 private:
  const FallbackConfig config_;
  FallbackState state_;
  FallbackDecision decision_;  // made from state_
  uint64_t stay_until_ = 0;
};

}  // namespace precondor

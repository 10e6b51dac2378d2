// SPDX-License-Identifier: Apache-2.0
// The mode that a session should have: the state of its fallback policy and the last decision.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/base/fallback_config.h"
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

  const FallbackState& state() const { return state_; }
  const FallbackDecision& decision() const { return decision_; }
  // Returns `schedule` with the decision applied from `first_open_step`, the first step that has not been granted to
  // any rank.
  std::vector<ModeInterval> WantedSchedule(const std::vector<ModeInterval>& schedule, uint64_t first_open_step) const {
    return ApplyDecision(decision_, schedule, first_open_step);
  }

 private:
  const FallbackConfig config_;
  FallbackState state_;
  FallbackDecision decision_;  // made from state_
};

}  // namespace precondor

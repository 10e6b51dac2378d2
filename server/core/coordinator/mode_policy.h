// SPDX-License-Identifier: Apache-2.0
// Which mode a session should have: the state of its fallback policy and what was last decided from it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/base/fallback_config.h"
#include "kernels/base/session_spec.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"

namespace precondor {

// Goes ahead of what is durable: its wishes take effect once they are written down (StepLeases). Not thread-safe.
class ModePolicy {
 public:
  ModePolicy(FallbackConfig config, FallbackState state);

  void Observe(const StepObservation& finished);
  // An operator's choice of the mode; nullopt gives it back to the policy.
  void Force(std::optional<Mode> mode);
  // No return to second order before all ranks have reported the steps below `step`.
  void StayInFirstOrderUntil(uint64_t step) { stay_until_ = step; }

  const FallbackState& state() const { return state_; }
  const FallbackDecision& decision() const { return decision_; }
  // `schedule` with the decision carried out from the first step that no rank has been granted. `open_from`: the
  // lowest step that not all ranks have reported.
  std::vector<ModeInterval> WantedSchedule(const std::vector<ModeInterval>& schedule, uint64_t first_open_step,
                                           uint64_t open_from) const;

 private:
  const FallbackConfig config_;
  FallbackState state_;
  FallbackDecision decision_;  // from state_
  uint64_t stay_until_ = 0;
};

}  // namespace precondor

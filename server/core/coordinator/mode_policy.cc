// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/mode_policy.h"

namespace precondor {

ModePolicy::ModePolicy(FallbackConfig config, FallbackState state)
    : config_(config), state_(state), decision_(Decide(config_, state_)) {}

void ModePolicy::Observe(const StepObservation& finished) {
  state_ = Advance(config_, state_, finished);
  decision_ = Decide(config_, state_);
}

void ModePolicy::Force(std::optional<Mode> mode) {
  state_ = precondor::Force(config_, state_, mode);
  decision_ = Decide(config_, state_);
}

std::vector<ModeInterval> ModePolicy::WantedSchedule(const std::vector<ModeInterval>& schedule,
                                                     uint64_t first_open_step, uint64_t open_from) const {
  std::vector<ModeInterval> wanted = ApplyDecision(decision_, schedule, first_open_step);
  return open_from < stay_until_ && ReturnsToSecondOrder(schedule, wanted) ? schedule : wanted;
}

}  // namespace precondor

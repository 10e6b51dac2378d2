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

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/core/step_slot.h"

#include "kernels/base/check.h"

namespace precondor {

PhaseState NextState(PhaseState state, PhaseEvent event) {
  switch (event) {
    case PhaseEvent::kSeal:
      PRECONDOR_CHECK(state == PhaseState::kOpen);
      return PhaseState::kSealed;
    case PhaseEvent::kApply:
      PRECONDOR_CHECK(state == PhaseState::kSealed);
      return PhaseState::kApplied;
    case PhaseEvent::kRetire:
      // From any state: an epoch may end at any time.
      return PhaseState::kRetired;
  }
  PRECONDOR_CHECK(false);
  return state;
}

void StepSlot::Inherit(absl::Span<const Member> members) {
  for (const Member& member : members) {
    const bool repeats = member.first_step <= step;
    statistics.gather.Inherit(member.rank, repeats);
    gradient.gather.Inherit(member.rank, repeats);
  }
}

std::optional<uint32_t> StepSlot::owing() const {
  const std::optional<uint32_t> rank = statistics.gather.owing();
  return rank.has_value() ? rank : gradient.gather.owing();
}

}  // namespace precondor

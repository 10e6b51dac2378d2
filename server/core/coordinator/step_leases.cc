// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/step_leases.h"

#include <algorithm>
#include <utility>

namespace precondor {
namespace {

// Number of leases that the durable lease reaches ahead, so that few reports wait for the disk.
constexpr uint64_t kDurableLeases = 4;

}  // namespace

LeaseTerms StepLeases::First(const SessionSpec& spec, uint64_t lease_steps) {
  LeaseTerms lease;
  lease.durable_through = StepSum(lease_steps, lease_steps * kDurableLeases);
  // A mode that is known in advance holds from the step that it names.
  lease.schedule =
      ApplyDecision(Decide(spec.fallback, lease.fallback), {{0, Mode::kSecondOrder}}, /*first_open_step=*/0);
  return lease;
}

StepLeases::StepLeases(LeaseTerms durable, uint64_t lease_steps, uint64_t granted_through)
    : lease_steps_(lease_steps),
      durable_(std::move(durable)),
      wanted_through_(granted_through),
      granted_through_(granted_through) {}

void StepLeases::ExtendBeyond(uint64_t step) {
  wanted_through_ = std::max(wanted_through_, StepSum(step, lease_steps_));
  Grant();
}

// No rank may be granted a step that a change of mode would affect while the change is being written, or may be found
// written after a crash.
void StepLeases::Grant() {
  if (mode_in_doubt_ || (pending_.has_value() && pending_->schedule != durable_.schedule)) return;
  uint64_t through = std::min(wanted_through_, durable_.durable_through);
  if (held_before_.has_value()) through = std::min(through, *held_before_ - 1);
  granted_through_ = std::max(granted_through_, through);
}

std::optional<LeaseTerms> StepLeases::BeginWrite(std::vector<ModeInterval> schedule, const FallbackState& fallback) {
  if (pending_.has_value()) return std::nullopt;
  const bool forced = fallback.forced != durable_.fallback.forced;
  const bool runs_short = StepSum(wanted_through_, lease_steps_) > durable_.durable_through;
  if (schedule == durable_.schedule && !runs_short && !forced && !mode_in_doubt_) return std::nullopt;
  pending_ = LeaseTerms{
      .durable_through = std::max(durable_.durable_through, StepSum(wanted_through_, kDurableLeases * lease_steps_)),
      .schedule = std::move(schedule),
      .fallback = fallback};
  return pending_;
}

void StepLeases::Adopt(LeaseTerms written) {
  pending_.reset();
  durable_ = std::move(written);
  mode_in_doubt_ = false;
  Grant();
}

void StepLeases::NoteInDoubt() {
  const std::optional<LeaseTerms> written = std::exchange(pending_, std::nullopt);
  mode_in_doubt_ = mode_in_doubt_ || written->schedule != durable_.schedule;
  Grant();
}

void StepLeases::EndHold() {
  held_before_.reset();
  Grant();
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// How far the leases of a session reach, and which mode each step has: what is durable, what is being written down, and
// what ranks have been granted of it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/base/session_spec.h"
#include "server/core/coordinator/coordinator_journal.h"
#include "server/core/coordinator/step_sum.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"

namespace precondor {

// Invariant: no rank is granted a step beyond what is durable, nor a step whose mode a write that is under way or in
// doubt would change. A grant is never taken back. Not thread-safe.
class StepLeases {
 public:
  // `granted_through`: what ranks may have been granted so far.
  StepLeases(LeaseTerms durable, uint64_t lease_steps, uint64_t granted_through);

  // A session begins with its first lease granted.
  static LeaseTerms First(const SessionSpec& spec, uint64_t lease_steps);

  const LeaseTerms& durable() const { return durable_; }
  // The durable one, or the one that is being written down.
  const std::vector<ModeInterval>& planned_schedule() const;
  // The last step that was ever granted to a rank.
  uint64_t granted_through() const { return granted_through_; }
  uint64_t first_open_step() const { return StepSum(granted_through_, 1); }

  // The lease is to reach beyond this step.
  void WantStep(uint64_t step);
  // A rank has reported this step.
  void ExtendBeyond(uint64_t reported_step);

  // A lease to write down, if it has to be longer, or `schedule` or an operator's choice in `fallback` is new, or what
  // was written before is in doubt. nullopt: nothing to write, or one is being written. Adopt, NoteInDoubt or
  // AbandonWrite ends it.
  std::optional<LeaseTerms> BeginWrite(std::vector<ModeInterval> schedule, const FallbackState& fallback);
  void Adopt(LeaseTerms written);
  // What was to be written may or may not be durable.
  void NoteInDoubt();
  // It was not written.
  void AbandonWrite();

  // No lease reaches this step until EndHold.
  void HoldBefore(uint64_t step) { held_before_ = step; }
  void EndHold();
  std::optional<uint64_t> held_before() const { return held_before_; }

 private:
  void Grant();

  const uint64_t lease_steps_;
  LeaseTerms durable_;
  std::optional<LeaseTerms> pending_;  // being written down
  bool mode_in_doubt_ = false;         // a change of mode may or may not have been written
  uint64_t wanted_through_;            // what reports and joins ask for
  uint64_t granted_through_;
  std::optional<uint64_t> held_before_;
};

}  // namespace precondor

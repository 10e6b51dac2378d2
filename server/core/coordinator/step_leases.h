// SPDX-License-Identifier: Apache-2.0
// A session's leases and the modes of its steps: what is durable, what is being written, and what has been granted to
// ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "kernels/base/session_spec.h"
#include "server/core/api/coordinator_journal.h"
#include "server/policy/fallback.h"

namespace precondor {

// Returns x + y, or the greatest number where the sum would be greater.
inline uint64_t StepSum(uint64_t x, uint64_t y) { return x + std::min(y, std::numeric_limits<uint64_t>::max() - x); }

// Invariant: no rank is granted a step beyond the durable lease, nor a step whose mode would be changed by a write that
// is in progress or in doubt. A grant is never withdrawn. Not thread-safe.
class StepLeases {
 public:
  // `granted_through` is the last step that ranks may have been granted so far.
  StepLeases(LeaseTerms durable, uint64_t lease_steps, uint64_t granted_through);

  // Returns the lease of a new session.
  static LeaseTerms First(const SessionSpec& spec, uint64_t lease_steps);

  const LeaseTerms& durable() const { return durable_; }
  // Returns the last step that was ever granted to a rank.
  uint64_t granted_through() const { return granted_through_; }
  uint64_t first_open_step() const { return StepSum(granted_through_, 1); }

  // Requests a lease that reaches lease_steps beyond this step.
  void ExtendBeyond(uint64_t step);

  // Returns a lease to write if it must be longer, `schedule` or the operator's choice in `fallback` has changed, or an
  // earlier write is in doubt. Returns nullopt otherwise, or if a lease is already being written. Adopt or
  // NoteInDoubt ends the write.
  std::optional<LeaseTerms> BeginWrite(std::vector<ModeInterval> schedule, const FallbackState& fallback);
  void Adopt(LeaseTerms written);
  // Ends a write whose record may or may not be durable.
  void NoteInDoubt();

  // Keeps leases from reaching this step until EndHold.
  void HoldBefore(uint64_t step) { held_before_ = step; }
  void EndHold();
  std::optional<uint64_t> held_before() const { return held_before_; }

 private:
  void Grant();

  const uint64_t lease_steps_;
  LeaseTerms durable_;
  std::optional<LeaseTerms> pending_;  // lease that is being written
  bool mode_in_doubt_ = false;         // a change of mode may or may not be durable
  uint64_t wanted_through_;            // last step that reports and joins have requested
  uint64_t granted_through_;
  std::optional<uint64_t> held_before_;
};

}  // namespace precondor

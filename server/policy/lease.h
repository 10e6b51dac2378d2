// SPDX-License-Identifier: Apache-2.0
// How far workers may go on without hearing from the coordinator, and in which mode. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// Steps that share a mode: from first_step up to the next interval's first step.
struct ModeInterval {
  uint64_t first_step = 0;
  Mode mode = Mode::kSecondOrder;
  bool operator==(const ModeInterval&) const = default;
};

struct LeaseInput {
  uint64_t reported_step = 0;    // the step that has finished
  uint64_t granted_through = 0;  // highest step granted to any rank so far
  uint64_t lease_steps = 0;      // how far beyond the reported step a lease reaches
};

struct LeaseDecision {
  uint64_t lease_through_step = 0;  // never less than granted_through: a grant is not taken back
  std::string reason;
};

LeaseDecision ExtendLease(const LeaseInput& input);

// Mode of `step`. `schedule` ascends by first_step and its first interval begins at 0; empty means second order.
Mode ModeAt(absl::Span<const ModeInterval> schedule, uint64_t step);

// The part of the schedule that covers [from_step, through_step], first interval beginning at from_step.
std::vector<ModeInterval> ModesBetween(absl::Span<const ModeInterval> schedule, uint64_t from_step,
                                       uint64_t through_step);

// `next` has steps in second order where `schedule` ends in first order; also when they end again, since a policy may
// want first order from a later step on. Neither is empty.
bool ReturnsToSecondOrder(absl::Span<const ModeInterval> schedule, absl::Span<const ModeInterval> next);

}  // namespace precondor

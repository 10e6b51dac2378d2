// SPDX-License-Identifier: Apache-2.0
// Decides how far workers may continue without an answer of the coordinator, and in which mode. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// Consecutive steps with one mode: from first_step to the step before the next interval.
struct ModeInterval {
  uint64_t first_step = 0;
  Mode mode = Mode::kSecondOrder;
  bool operator==(const ModeInterval&) const = default;
};

struct LeaseInput {
  uint64_t reported_step = 0;    // step that was reported as finished
  uint64_t granted_through = 0;  // greatest step granted to any rank so far
  uint64_t lease_steps = 0;      // number of steps that a lease reaches beyond the reported step
};

struct LeaseDecision {
  uint64_t lease_through_step = 0;  // at least granted_through: a grant is never revoked
  std::string reason;
};

LeaseDecision ExtendLease(const LeaseInput& input);

// Returns the mode of `step`. `schedule` ascends by first_step, and its first interval begins at 0. An empty schedule
// means second order.
Mode ModeAt(absl::Span<const ModeInterval> schedule, uint64_t step);

// Returns the part of the schedule that covers [from_step, through_step]. Its first interval begins at from_step.
std::vector<ModeInterval> ModesBetween(absl::Span<const ModeInterval> schedule, uint64_t from_step,
                                       uint64_t through_step);

// Returns whether `next` has steps in second order where `schedule` ends in first order, even if first order follows
// again, because a policy may select first order from a later step on. Precondition: neither is empty.
bool ReturnsToSecondOrder(absl::Span<const ModeInterval> schedule, absl::Span<const ModeInterval> next);

}  // namespace precondor

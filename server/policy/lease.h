// SPDX-License-Identifier: Apache-2.0
// Decides in which mode workers continue. Pure functions.
#pragma once

#include <cstdint>
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

// Returns the mode of `step`. `schedule` ascends by first_step, and its first interval begins at 0. An empty schedule
// means second order.
Mode ModeAt(absl::Span<const ModeInterval> schedule, uint64_t step);

// Returns the part of the schedule that covers [from_step, through_step]. Its first interval begins at from_step.
std::vector<ModeInterval> ModesBetween(absl::Span<const ModeInterval> schedule, uint64_t from_step,
                                       uint64_t through_step);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/policy/lease.h"

namespace precondor {

Mode ModeAt(absl::Span<const ModeInterval> schedule, uint64_t step) {
  Mode mode = Mode::kSecondOrder;
  for (const ModeInterval& interval : schedule) {
    if (interval.first_step > step) break;
    mode = interval.mode;
  }
  return mode;
}

std::vector<ModeInterval> ModesBetween(absl::Span<const ModeInterval> schedule, uint64_t from_step,
                                       uint64_t through_step) {
  std::vector<ModeInterval> modes = {{from_step, ModeAt(schedule, from_step)}};
  for (const ModeInterval& interval : schedule) {
    if (interval.first_step <= from_step) continue;
    if (interval.first_step > through_step) break;
    if (interval.mode != modes.back().mode) modes.push_back(interval);
  }
  return modes;
}

}  // namespace precondor

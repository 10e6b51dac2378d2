// SPDX-License-Identifier: Apache-2.0
// The end of a wait, in time that nobody sets back or ahead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/time/time.h"

#include "kernels/base/clock.h"

namespace precondor {

class Deadline {
 public:
  explicit Deadline(absl::Duration timeout) : end_(RealClock().Monotonic() + timeout) {}
  bool passed() const { return left() <= absl::ZeroDuration(); }
  absl::Duration left() const { return end_ - RealClock().Monotonic(); }
  // What poll takes: at least 1 before the end, 0 from then on.
  int poll_ms() const {
    const absl::Duration rest = left();
    if (rest <= absl::ZeroDuration()) return 0;
    return static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(rest) + 1, std::numeric_limits<int>::max()));
  }

 private:
  const absl::Time end_;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Time as an argument, so that tests and the simulator can own it. All waiting, timing and comparing is done in
// monotonic time; the wall clock is for people, and for numbers that outlive the machine's boot.
#pragma once

#include <algorithm>
#include <chrono>
#include <time.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace precondor {

// Never set back or ahead, and goes on while the process or the machine is stopped; its zero means nothing. For times
// that only this machine compares, and only until it is booted again.
inline absl::Time MonotonicNow() {
  timespec now = {};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return absl::TimeFromTimespec(now);
}

// A time of MonotonicNow as CondVar::wait_until takes it; at most a year ahead.
inline std::chrono::steady_clock::time_point SteadyTime(absl::Time monotonic) {
  const absl::Duration left = std::clamp(monotonic - MonotonicNow(), absl::ZeroDuration(), absl::Hours(24 * 365));
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(left);
}

class Clock {
 public:
  virtual ~Clock() = default;
  // As MonotonicNow.
  virtual absl::Time Now() const = 0;
  // May be set to any other time at any time. tests/lint says who may ask for it.
  virtual absl::Time Wall() const { return Now(); }
};

// The machine's clocks; thread-safe.
class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return MonotonicNow(); }
  absl::Time Wall() const override { return absl::Now(); }
};

}  // namespace precondor

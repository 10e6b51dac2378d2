// SPDX-License-Identifier: Apache-2.0
// Time as a dependency that is passed in, so that tests and the simulator can control it. All waiting, timing and
// comparing uses monotonic time. The wall clock is for people, and for numbers that must survive a reboot of the
// machine.
#pragma once

#include <algorithm>
#include <chrono>
#include <time.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace precondor {

// Returns monotonic time (CLOCK_BOOTTIME). It is never set, and it advances while the process is stopped or the machine
// is suspended. Its zero has no meaning, so compare such times only on this machine and within one boot.
inline absl::Time MonotonicNow() {
  timespec now = {};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return absl::TimeFromTimespec(now);
}

// Converts a time of MonotonicNow to one that CondVar::wait_until takes; at most a year ahead.
inline std::chrono::steady_clock::time_point SteadyTime(absl::Time monotonic) {
  const absl::Duration left = std::clamp(monotonic - MonotonicNow(), absl::ZeroDuration(), absl::Hours(24 * 365));
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(left);
}

class Clock {
 public:
  virtual ~Clock() = default;
  // Returns monotonic time, with the properties of MonotonicNow.
  virtual absl::Time Now() const = 0;
  // Returns wall-clock time, which can be set to any value at any time. tests/lint lists the files that may call it.
  virtual absl::Time Wall() const { return Now(); }
};

// The machine's clocks; thread-safe.
class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return MonotonicNow(); }
  absl::Time Wall() const override { return absl::Now(); }
};

}  // namespace precondor

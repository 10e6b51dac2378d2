// SPDX-License-Identifier: Apache-2.0
// Time as an argument, so that tests and the simulator can own it.
#pragma once

#include <time.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace precondor {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
  // Never set back or ahead, and goes on while the process or the machine is stopped; its zero means nothing. For
  // times that only this machine compares.
  virtual absl::Time Monotonic() const { return Now(); }
};

// The machine's clocks; thread-safe.
class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::Now(); }
  absl::Time Monotonic() const override {
    timespec now = {};
    clock_gettime(CLOCK_BOOTTIME, &now);
    return absl::TimeFromTimespec(now);
  }
};

}  // namespace precondor

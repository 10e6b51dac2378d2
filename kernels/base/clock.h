// SPDX-License-Identifier: Apache-2.0
// Time as an argument, so that tests and the simulator can own it.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace precondor {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

// The machine's wall clock; thread-safe.
class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::Now(); }
};

}  // namespace precondor

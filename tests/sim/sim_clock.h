// SPDX-License-Identifier: Apache-2.0
// One machine's clock: virtual time and an offset, which a fault can set.
#pragma once

#include <cstdint>

#include "kernels/base/clock.h"
#include "tests/sim/event_queue.h"

namespace precondor::sim {

class SimClock final : public Clock {
 public:
  explicit SimClock(const EventQueue& queue) : queue_(queue) {}
  absl::Time Now() const override { return absl::FromUnixMicros(kStartMicros + queue_.now_us()); }
  absl::Time Wall() const override { return absl::FromUnixMicros(kStartMicros + queue_.now_us() + offset_us_); }
  // The wall clock, forwards or backwards.
  void Jump(int64_t by_us) { offset_us_ += by_us; }

 private:
  static constexpr int64_t kStartMicros = 1'000'000'000;  // later than any jump goes back
  const EventQueue& queue_;
  int64_t offset_us_ = 0;
};

}  // namespace precondor::sim

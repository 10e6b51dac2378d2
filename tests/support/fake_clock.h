// SPDX-License-Identifier: Apache-2.0
// Clocks that stand still until a test moves them.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/base/clock.h"

namespace precondor {

// Thread-safe.
class FakeClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::FromUnixNanos(nanos_.load()); }
  absl::Time Wall() const override { return absl::FromUnixNanos(nanos_.load() + wall_nanos_.load()); }
  // Time passes.
  void Advance(absl::Duration by) { nanos_ += absl::ToInt64Nanoseconds(by); }
  // The wall clock is set to another time, ahead or back; none passes.
  void SetWall(absl::Duration by) { wall_nanos_ += absl::ToInt64Nanoseconds(by); }

 private:
  std::atomic<int64_t> nanos_ = int64_t{1'000'000'000};
  std::atomic<int64_t> wall_nanos_ = 0;
};

}  // namespace precondor

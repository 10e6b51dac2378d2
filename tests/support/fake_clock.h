// SPDX-License-Identifier: Apache-2.0
// A clock that stands still until a test moves it.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/base/clock.h"

namespace precondor {

// Thread-safe.
class FakeClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::FromUnixNanos(nanos_.load()); }
  void Advance(absl::Duration by) { nanos_ += absl::ToInt64Nanoseconds(by); }

 private:
  std::atomic<int64_t> nanos_ = int64_t{1'000'000'000};
};

}  // namespace precondor

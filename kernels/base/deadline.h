// SPDX-License-Identifier: Apache-2.0
// The end of a wait in monotonic time, which no clock change moves; or an earlier end, when the caller's flag says so.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "absl/time/time.h"

#include "kernels/base/clock.h"

namespace precondor {

class Deadline {
 public:
  // Passes too, within a tenth of a second, once `*give_up` is true; null: never. It outlives the deadline.
  explicit Deadline(absl::Duration timeout, const std::atomic<bool>* give_up = nullptr)
      : end_(MonotonicNow() + timeout), give_up_(give_up) {}
  bool passed() const { return left() <= absl::ZeroDuration(); }
  absl::Duration left() const {
    if (give_up_ != nullptr && give_up_->load(std::memory_order_relaxed)) return absl::ZeroDuration();
    return end_ - MonotonicNow();
  }
  // What poll takes: at least 1 before the end, 0 from then on. It may come back before the end.
  int poll_ms() const {
    const absl::Duration rest = left();
    if (rest <= absl::ZeroDuration()) return 0;
    const int most = give_up_ != nullptr ? 100 : std::numeric_limits<int>::max();
    return static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(rest) + 1, most));
  }

 private:
  const absl::Time end_;
  const std::atomic<bool>* const give_up_;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The end of a wait in monotonic time, which no change of the wall clock moves. A caller's flag can end the wait
// earlier.
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
  // Ends after `timeout`, or within 0.1 s after `*give_up` becomes true. A null `give_up` never ends the wait.
  // `*give_up` must outlive the deadline.
  explicit Deadline(absl::Duration timeout, const std::atomic<bool>* give_up = nullptr)
      : end_(MonotonicNow() + timeout), give_up_(give_up) {}
  bool passed() const { return left() <= absl::ZeroDuration(); }
  absl::Duration left() const {
    if (give_up_ != nullptr && give_up_->load(std::memory_order_relaxed)) return absl::ZeroDuration();
    return end_ - MonotonicNow();
  }
  // Returns the time-out for poll(2) in ms: at least 1 before the end, 0 after it. poll may return before the end.
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

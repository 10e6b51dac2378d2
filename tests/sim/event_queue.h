// SPDX-License-Identifier: Apache-2.0
// Virtual time and what happens in it, one event after the other on one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

namespace precondor::sim {

class EventQueue {
 public:
  int64_t now_us() const { return now_us_; }

  // Events of the same time happen in the order of scheduling.
  void After(int64_t delay_us, std::function<void()> event) {
    events_.emplace(std::make_pair(now_us_ + delay_us, next_++), std::move(event));
  }
  // False when nothing is left.
  bool RunOne() {
    if (events_.empty()) return false;
    auto first = events_.begin();
    now_us_ = first->first.first;
    const std::function<void()> event = std::move(first->second);
    events_.erase(first);
    event();
    return true;
  }

 private:
  int64_t now_us_ = 0;
  uint64_t next_ = 0;
  std::map<std::pair<int64_t, uint64_t>, std::function<void()>> events_;
};

}  // namespace precondor::sim

// SPDX-License-Identifier: Apache-2.0
// Statistics that a layer is sent while it waits for factors from another shard's journal: they are applied to those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "kernels/base/session_spec.h"
#include "server/core/gather.h"

namespace precondor {

// One thread at a time. A function of what is added alone, so that a replay ends with the same.
class AsideUpdates {
 public:
  // Vectors are small; covariances are as large as factors.
  static size_t Most(const SessionSpec& spec, uint32_t layer) {
    return StatisticsOf(spec, layer) == StatisticsKind::kCovariance ? 2 : 32;
  }
  explicit AsideUpdates(size_t most) : most_(most) {}

  struct Update {
    uint64_t step = 0;
    std::vector<Vote> votes;
  };
  // One step's votes, in the order of steps. False: the oldest made room, and are lost.
  bool Add(Update update) {
    if (update.votes.empty()) return true;
    updates_.push_back(std::move(update));
    if (updates_.size() <= most_) return true;
    updates_.pop_front();
    return false;
  }
  // In their order.
  std::deque<Update> Take() { return std::exchange(updates_, {}); }
  bool empty() const { return updates_.empty(); }

 private:
  size_t most_;
  std::deque<Update> updates_;
};

}  // namespace precondor

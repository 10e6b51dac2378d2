// SPDX-License-Identifier: Apache-2.0
// Counters of one layer's work and a summary of its factors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "server/core/api/shard_summary.h"
#include "server/core/layer/layer_worker.h"

namespace precondor {

// Accumulates the LayerStats of one layer. Not thread-safe: LayerDriver::mu_ guards it.
class LayerCounters {
 public:
  LayerCounters(uint32_t layer, std::string name) {
    stats_.layer = layer;
    stats_.name = std::move(name);
  }

  void CountAccepted(uint64_t accepted) { stats_.accepted += accepted; }
  void CountDuplicate() { ++stats_.duplicates; }
  void CountRejected() { ++stats_.rejected; }
  void CountSealed(uint64_t step) { stats_.last_sealed_step = std::max(stats_.last_sealed_step, step); }
  void CountUpdate(const LayerWorker::UpdateOutcome& outcome);
  void CountAnswer(const GradientResult& answer);
  void Show(const LayerWorker::StateView& view);

  const LayerStats& stats() const { return stats_; }

 private:
  LayerStats stats_;
  // Sums in seconds, and the count, from which the means in stats_ are computed.
  double update_seconds_ = 0;
  double precondition_seconds_ = 0;
  uint64_t updates_ = 0;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The disk of one rank's trainer: before it sends anything of a step it writes the weights that the step begins with.
// Weights are a digest of every answer that was applied to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace precondor::sim {

class Checkpoints {
 public:
  uint64_t last_step() const { return weights_.size() - 1; }
  uint64_t weights(uint64_t step) const { return weights_[step]; }
  // The epoch in which the last one was written.
  uint64_t epoch() const { return epoch_; }

  void Write(uint64_t step, uint64_t weights, uint64_t epoch) {
    weights_.resize(step);
    weights_.push_back(weights);
    epoch_ = epoch;
  }
  // Goes on from an earlier one; the later ones go.
  void GoBackTo(uint64_t step) { weights_.resize(std::min<uint64_t>(weights_.size(), step + 1)); }

 private:
  std::vector<uint64_t> weights_ = {0};  // by step
  uint64_t epoch_ = 0;
};

}  // namespace precondor::sim

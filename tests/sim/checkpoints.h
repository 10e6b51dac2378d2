// SPDX-License-Identifier: Apache-2.0
// The disk of one rank's trainer: before it sends anything of a step it writes the weights that the step begins with,
// and the versions of its last answers. Weights are a digest of every answer that was applied to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace precondor::sim {

class Checkpoints {
 public:
  uint64_t last_step() const { return weights_.size() - 1; }
  uint64_t weights(uint64_t step) const { return weights_[step]; }
  // By layer; see WorkerOptions::factor_versions.
  const std::vector<uint64_t>& versions(uint64_t step) const { return versions_[step]; }
  // The epoch in which the last one was written.
  uint64_t epoch() const { return epoch_; }

  void Write(uint64_t step, uint64_t weights, const std::vector<uint64_t>& versions, uint64_t epoch) {
    weights_.resize(step);
    weights_.push_back(weights);
    versions_.resize(step);
    versions_.push_back(versions);
    epoch_ = epoch;
  }
  // Goes on from an earlier one; the later ones go.
  void GoBackTo(uint64_t step) {
    weights_.resize(std::min<uint64_t>(weights_.size(), step + 1));
    versions_.resize(weights_.size());
  }

 private:
  std::vector<uint64_t> weights_ = {0};  // by step
  std::vector<std::vector<uint64_t>> versions_ = {{}};
  uint64_t epoch_ = 0;
};

}  // namespace precondor::sim

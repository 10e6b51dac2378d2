// SPDX-License-Identifier: Apache-2.0
// The job's own all-reduce between worker threads, for DELEGATE, REPLAY and PULL_FACTORS: there the service takes part
// with gradients that the job has averaged. A real job uses its framework's all-reduce in this place.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <vector>

#include "kernels/base/matrix_view.h"

namespace precondor::digits {

// All ranks make the same calls in the same order, one thread each; every call waits for all ranks. Matrices are
// contiguous, and have one shape on all ranks.
class RankReducer {
 public:
  explicit RankReducer(int32_t ranks) : slots_(static_cast<size_t>(ranks)), weights_(slots_.size()), barrier_(ranks) {}

  // matrix = sum_i weight_i matrix_i / sum_i weight_i over the ranks, in f64 and in rank order: all ranks get equal
  // bits.
  void WeightedMean(int32_t rank, double weight, MatrixView matrix) {
    slots_[static_cast<size_t>(rank)].assign(matrix.data, matrix.data + matrix.size());
    weights_[static_cast<size_t>(rank)] = weight;
    barrier_.arrive_and_wait();
    double total = 0;
    for (const double one : weights_) total += one;
    for (int64_t i = 0; i < matrix.size(); ++i) {
      double sum = 0;
      for (size_t r = 0; r < slots_.size(); ++r) {
        sum += weights_[r] * static_cast<double>(slots_[r][static_cast<size_t>(i)]);
      }
      matrix.data[i] = static_cast<float>(sum / total);
    }
    barrier_.arrive_and_wait();  // no rank fills its slot again before all have read it
  }

  // matrix = the matrix of rank `root`.
  void Broadcast(int32_t rank, int32_t root, MatrixView matrix) {
    std::vector<float>& slot = slots_[static_cast<size_t>(root)];
    if (rank == root) slot.assign(matrix.data, matrix.data + matrix.size());
    barrier_.arrive_and_wait();
    if (rank != root) std::copy(slot.begin(), slot.end(), matrix.data);
    barrier_.arrive_and_wait();
  }

 private:
  std::vector<std::vector<float>> slots_;  // of each rank
  std::vector<double> weights_;
  std::barrier<> barrier_;
};

}  // namespace precondor::digits

// SPDX-License-Identifier: Apache-2.0
// A layer's state on the CPU backend, with what it has been fed, so that its answer can be checked by definition.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/methods/method.h"

namespace precondor {

// Method mkor, EXACT_DAMPED, NORM_RESCALE. One thread. It aborts where the backend refuses.
class BenchLayer {
 public:
  static constexpr int64_t kVectors = 16;  // of a statistic step: 4 workers x 4 sketches

  // `representation` as in docs/use/methods/mkor.md; rank 0: the method's default.
  BenchLayer(int64_t d_out, int64_t d_in, const std::string& representation, int64_t rank);

  void Feed(uint64_t seed);  // Gaussian vectors
  void Precondition();

  // Columns in use of both factors together: what a precondition really multiplies with.
  int64_t ranks() const { return state_->summary().input_rank + state_->summary().output_rank; }

  // |A U B w - D w| / |D w| in double, with U = A^-1 D B^-1 as computed, w random, and A and B the damped averages of
  // all that was fed, written from the definition. Both are scaled to length 1, and |U| is compared with |D| too. Valid
  // while the rank suffices for all vectors fed.
  double RelativeError();

 private:
  std::vector<double> Times(const std::vector<float>& matrix, const std::vector<double>& x) const;

  int64_t d_out_ = 0, d_in_ = 0;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LayerState> state_;
  DeviceMatrix d_, u_, a_, g_;
  std::vector<float> host_d_;
  std::vector<std::vector<float>> fed_a_, fed_g_;  // one entry a step, vectors as rows
};

}  // namespace precondor

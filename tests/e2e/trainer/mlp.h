// SPDX-License-Identifier: Apache-2.0
// A multilayer perceptron with manual forward and backward passes over BLAS. Each layer holds W [d_out, d_in + 1] with
// the bias as its last column. The backward pass hands out, layer by layer, the rows that statistics are made from.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "tests/e2e/trainer/digits_data.h"
#include "tests/e2e/trainer/host_matrix.h"

namespace precondor::digits {

enum class Objective : uint8_t {
  kClassify,     // softmax cross-entropy of the label, mean over rows
  kReconstruct,  // mean squared error of the pixels, mean over rows and pixels
};

struct MlpSpec {
  std::vector<int64_t> widths;  // input, hidden ..., output
  Objective objective = Objective::kClassify;
};

// The layer table for a session: names "layer0" ..., bias folded in.
std::vector<LayerSpec> LayersOf(const MlpSpec& spec);

// One layer's part of a backward pass over n rows. Valid until the next pass.
struct LayerTap {
  int64_t layer = 0;
  ConstMatrixView inputs;            // [n, d_in + 1], the last column ones
  ConstMatrixView output_gradients;  // [n, d_out], of a loss that is the mean over these n rows
  MatrixView gradient;               // [d_out, d_in + 1] = output_gradients' inputs
};

struct Evaluation {
  double loss = 0;
  double accuracy = 0;  // 0 for kReconstruct
};

// Hidden layers are tanh, the output is linear. One thread at a time.
class Mlp {
 public:
  // Weights are uniform in +-sqrt(6 / (d_in + d_out)), biases zero; a function of (spec, seed).
  Mlp(const MlpSpec& spec, uint64_t seed);

  int64_t num_layers() const { return static_cast<int64_t>(weights_.size()); }
  std::vector<HostMatrix>& weights() { return weights_; }
  const std::vector<HostMatrix>& weights() const { return weights_; }
  MatrixView gradient(int64_t layer) { return gradients_[static_cast<size_t>(layer)].view(); }

  // Forward and backward over all rows of `batch` (at least one); the mean loss. Calls `ready` from the last layer to
  // the first, each as soon as its gradient is there; the first failure ends the pass and is returned.
  absl::StatusOr<double> Backward(const Examples& batch, const std::function<absl::Status(const LayerTap&)>& ready);

  Evaluation Evaluate(const Examples& examples);

 private:
  const MlpSpec spec_;
  std::vector<HostMatrix> weights_;    // [d_out, d_in + 1]
  std::vector<HostMatrix> gradients_;  // as weights_
  std::vector<HostMatrix> inputs_;     // of each layer [n, d_in + 1]; the entry after the last is the output [n, d_out]
  std::vector<HostMatrix> deltas_;     // dLoss / dOutput before the activation, of each layer [n, d_out]
};

// Keeps BLAS on the calling thread: these matrices are small, and the sums' order must not depend on the machine.
void UseSingleThreadedBlas();

}  // namespace precondor::digits

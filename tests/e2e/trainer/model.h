// SPDX-License-Identifier: Apache-2.0
// A small network on real data: the UCI optical handwritten digits (data/ATTRIBUTION.md), and a multilayer perceptron
// with manual forward and backward passes over BLAS.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"

namespace precondor::digits {

// Zeroed at birth.
class HostMatrix {
 public:
  HostMatrix() = default;
  HostMatrix(int64_t rows, int64_t cols) : rows_(rows), cols_(cols), data_(static_cast<size_t>(rows * cols)) {}

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  MatrixView view() { return MatrixView(data_.data(), rows_, cols_); }
  ConstMatrixView view() const { return ConstMatrixView(data_.data(), rows_, cols_); }
  std::vector<float>& data() { return data_; }
  const std::vector<float>& data() const { return data_; }

 private:
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<float> data_;
};

inline constexpr int64_t kPixels = 64;
inline constexpr int64_t kClasses = 10;

struct Examples {
  HostMatrix pixels;            // [n, 64], scaled to 0 ... 1
  std::vector<int32_t> labels;  // n of 0 ... 9
  int64_t size() const { return pixels.rows(); }
};

struct DigitsData {
  Examples train;
  Examples held_out;
};

// Reads lines of 64 pixels 0 ... 16 and a label, comma-separated, and holds a fifth of the examples out, the same fifth
// in every run.
absl::StatusOr<DigitsData> LoadDigits(const std::string& path);

// The given rows, in the given order.
Examples Select(const Examples& from, absl::Span<const int32_t> rows);

// A random order of 0 ... n - 1, a function of the key on every machine.
std::vector<int32_t> Permutation(absl::Span<const uint64_t> key, int64_t n);

// Rows of the step's batch: `batch_size` different ones, a pure function of (seed, step). Consecutive steps walk
// through a random order of all examples, drawn anew for each pass; what does not fill a batch at the end of a pass is
// left out.
std::vector<int32_t> BatchRows(int64_t examples, int64_t batch_size, uint64_t seed, uint64_t step);

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

// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/model.h"

#include <algorithm>
#include <cblas.h>
#include <cmath>
#include <fstream>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/check.h"
#include "kernels/base/random.h"

namespace precondor::digits {
namespace {

constexpr float kFullPixel = 16;
constexpr uint64_t kSplitSeed = 1998, kSplitPurpose = 1, kBatchPurpose = 2;
constexpr int64_t kHeldOutShare = 5;

constexpr uint64_t kInitPurpose = 3;

// c = op(a) op(b).
void Gemm(ConstMatrixView a, bool transpose_a, ConstMatrixView b, bool transpose_b, MatrixView c) {
  const int64_t inner = transpose_a ? a.rows : a.cols;
  cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
              static_cast<int>(c.rows), static_cast<int>(c.cols), static_cast<int>(inner), 1.0f, a.data,
              static_cast<int>(a.stride), b.data, static_cast<int>(b.stride), 0.0f, c.data, static_cast<int>(c.stride));
}

// Cross-entropy of one row of logits; `gradient` becomes scale * (softmax - onehot).
double CrossEntropy(const float* logits, int32_t label, double scale, float* gradient) {
  const float largest = *std::max_element(logits, logits + kClasses);
  double sum = 0;
  for (int64_t j = 0; j < kClasses; ++j) sum += std::exp(static_cast<double>(logits[j] - largest));
  for (int64_t j = 0; j < kClasses; ++j) {
    const double p = std::exp(static_cast<double>(logits[j] - largest)) / sum;
    gradient[j] = static_cast<float>(scale * (p - (j == label ? 1.0 : 0.0)));
  }
  return std::log(sum) - static_cast<double>(logits[label] - largest);
}

// Mean squared error of one row; `gradient` becomes scale * its gradient.
double SquaredError(const float* output, const float* target, double scale, float* gradient) {
  double sum = 0;
  for (int64_t j = 0; j < kPixels; ++j) {
    const double error = static_cast<double>(output[j]) - static_cast<double>(target[j]);
    sum += error * error;
    gradient[j] = static_cast<float>(scale * 2 * error / static_cast<double>(kPixels));
  }
  return sum / static_cast<double>(kPixels);
}

}  // namespace

absl::StatusOr<DigitsData> LoadDigits(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  std::vector<int32_t> labels;
  std::vector<float> pixels;
  for (std::string line; std::getline(file, line);) {
    for (const absl::string_view field : absl::StrSplit(line, ',')) {
      int32_t value = 0;
      PRECONDOR_CHECK(absl::SimpleAtoi(field, &value));
      pixels.push_back(static_cast<float>(value) / kFullPixel);
    }
    PRECONDOR_CHECK(pixels.size() == (labels.size() + 1) * kPixels + 1);
    labels.push_back(static_cast<int32_t>(pixels.back() * kFullPixel));
    pixels.pop_back();
  }
  Examples all{HostMatrix(static_cast<int64_t>(labels.size()), kPixels), labels};
  all.pixels.data() = std::move(pixels);
  std::vector<int32_t> order = Permutation({kSplitSeed, kSplitPurpose, 0}, all.size());
  const auto held_out = static_cast<size_t>(all.size() / kHeldOutShare);
  std::sort(order.begin(), order.begin() + all.size() / kHeldOutShare);  // both parts keep the file's order
  std::sort(order.begin() + all.size() / kHeldOutShare, order.end());
  const absl::Span<const int32_t> rows = order;
  return DigitsData{Select(all, rows.subspan(held_out)), Select(all, rows.first(held_out))};
}

Examples Select(const Examples& from, absl::Span<const int32_t> rows) {
  Examples to{HostMatrix(static_cast<int64_t>(rows.size()), kPixels), std::vector<int32_t>(rows.size())};
  for (size_t i = 0; i < rows.size(); ++i) {
    const float* source = from.pixels.view().row(rows[i]);
    std::copy(source, source + kPixels, to.pixels.view().row(static_cast<int64_t>(i)));
    to.labels[i] = from.labels[static_cast<size_t>(rows[i])];
  }
  return to;
}

std::vector<int32_t> Permutation(absl::Span<const uint64_t> key, int64_t n) {
  const CounterRandom bits(key);
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[bits.Bits(order.size() - i) % i]);
  return order;
}

std::vector<int32_t> BatchRows(int64_t examples, int64_t batch_size, uint64_t seed, uint64_t step) {
  const auto per_pass = static_cast<uint64_t>(examples / batch_size);
  const std::vector<int32_t> order = Permutation({seed, kBatchPurpose, step / per_pass}, examples);
  const auto begin = order.begin() + static_cast<int64_t>(step % per_pass) * batch_size;
  return std::vector<int32_t>(begin, begin + batch_size);
}

std::vector<LayerSpec> LayersOf(const MlpSpec& spec) {
  std::vector<LayerSpec> layers;
  for (size_t l = 0; l + 1 < spec.widths.size(); ++l) {
    layers.push_back(LayerSpec{absl::StrCat("layer", l), spec.widths[l + 1], spec.widths[l] + 1, true});
  }
  return layers;
}

Mlp::Mlp(const MlpSpec& spec, uint64_t seed) : spec_(spec) {
  for (const LayerSpec& layer : LayersOf(spec)) {
    const CounterRandom random({seed, kInitPurpose, weights_.size()});
    const double bound = std::sqrt(6.0 / static_cast<double>(layer.d_in - 1 + layer.d_out));
    HostMatrix weight(layer.d_out, layer.d_in);
    uint64_t drawn = 0;
    for (int64_t i = 0; i < layer.d_out; ++i) {
      for (int64_t j = 0; j + 1 < layer.d_in; ++j) {
        const double uniform = static_cast<double>(random.Bits(drawn++) >> 11) * 0x1p-53;  // in [0, 1)
        weight.view().at(i, j) = static_cast<float>(bound * (2 * uniform - 1));
      }
    }
    weights_.push_back(std::move(weight));
    gradients_.emplace_back(layer.d_out, layer.d_in);
  }
}

// Leaves the gradient of the loss in the last of `deltas_`.
Evaluation Mlp::Evaluate(const Examples& examples) {
  const int64_t n = examples.size();
  if (inputs_.empty() || inputs_[0].rows() != n) {
    inputs_.clear();
    deltas_.clear();
    for (const HostMatrix& weight : weights_) {
      inputs_.emplace_back(n, weight.cols());
      deltas_.emplace_back(n, weight.rows());
      for (int64_t i = 0; i < n; ++i) inputs_.back().view().at(i, weight.cols() - 1) = 1.0f;
    }
    inputs_.emplace_back(n, weights_.back().rows());
  }
  for (int64_t i = 0; i < n; ++i) {
    std::copy(examples.pixels.view().row(i), examples.pixels.view().row(i) + kPixels, inputs_[0].view().row(i));
  }
  for (size_t l = 0; l < weights_.size(); ++l) {
    // The next layer's bias column stays as it is.
    const MatrixView output = inputs_[l + 1].view().Corner(n, weights_[l].rows());
    Gemm(inputs_[l].view(), false, weights_[l].view(), true, output);
    for (int64_t i = 0; i < n && l + 1 < weights_.size(); ++i) {
      for (int64_t j = 0; j < output.cols; ++j) output.at(i, j) = std::tanh(output.at(i, j));
    }
  }
  const double scale = 1.0 / static_cast<double>(n);
  Evaluation total;
  for (int64_t i = 0; i < n; ++i) {
    const float* output = inputs_.back().view().row(i);
    float* gradient = deltas_.back().view().row(i);
    const int32_t label = examples.labels[static_cast<size_t>(i)];
    if (spec_.objective == Objective::kReconstruct) {
      total.loss += SquaredError(output, examples.pixels.view().row(i), scale, gradient);
    } else {
      total.loss += CrossEntropy(output, label, scale, gradient);
      if (std::max_element(output, output + kClasses) - output == label) total.accuracy += 1;
    }
  }
  total.loss *= scale;
  total.accuracy *= scale;
  return total;
}

absl::StatusOr<double> Mlp::Backward(const Examples& batch, const std::function<absl::Status(const LayerTap&)>& ready) {
  const double loss = Evaluate(batch).loss;
  for (int64_t layer = num_layers() - 1; layer >= 0; --layer) {
    const auto l = static_cast<size_t>(layer);
    const MatrixView delta = deltas_[l].view();
    Gemm(delta, true, inputs_[l].view(), false, gradients_[l].view());
    if (layer > 0) {
      // Before `ready`, which may hand the gradient over and let the weights change later.
      const MatrixView below = deltas_[l - 1].view();
      Gemm(delta, false, weights_[l].view().Corner(weights_[l].rows(), weights_[l].cols() - 1), false, below);
      for (int64_t i = 0; i < below.rows; ++i) {
        const float* output = inputs_[l].view().row(i);
        for (int64_t j = 0; j < below.cols; ++j) below.at(i, j) *= 1.0f - output[j] * output[j];
      }
    }
    absl::Status status = ready(LayerTap{layer, inputs_[l].view(), delta, gradients_[l].view()});
    if (!status.ok()) return status;
  }
  return loss;
}

void UseSingleThreadedBlas() { openblas_set_num_threads(1); }

}  // namespace precondor::digits

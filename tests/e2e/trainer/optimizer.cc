// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/casts.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// A part of a parameter that the optimizer treats as one tensor: the weight without its bias column, or that column.
struct Tensor {
  MatrixView weight;
  ConstMatrixView gradient;
  float* state;  // the parameter's state at this part; rows are `state_stride` apart
  int64_t state_stride;
  int64_t state_size;  // elements from one moment to the next
  double decay;

  int64_t rows() const { return weight.rows; }
  int64_t cols() const { return weight.cols; }
  float* moment(int which, int64_t row) const { return state + which * state_size + row * state_stride; }
};

template <typename View>
View Columns(View view, int64_t begin, int64_t count) {
  return View(view.data + begin, view.rows, count, view.stride);
}

double SquaredNorm(ConstMatrixView x) {
  double sum = 0;
  for (int64_t i = 0; i < x.rows; ++i) {
    const float* row = x.row(i);
    for (int64_t j = 0; j < x.cols; ++j) sum += static_cast<double>(row[j]) * row[j];
  }
  return sum;
}

// Base of all optimizers: checks shapes, keeps the state, and splits parameters into tensors.
class OptimizerBase : public Optimizer {
 public:
  OptimizerBase(OptimizerConfig config, int moments) : config_(std::move(config)), moments_(moments) {}

  absl::Status Step(absl::Span<const Parameter> parameters, double learning_rate) final {
    if (!(learning_rate >= 0) || !std::isfinite(learning_rate)) {
      return absl::InvalidArgumentError(
          absl::StrCat("learning rate: expected a finite number of at least 0, got ", learning_rate));
    }
    PRECONDOR_RETURN_IF_ERROR(CheckShapes(parameters));
    if (step_ == 0) {
      for (const Parameter& p : parameters) {
        shapes_.push_back({p.weight.rows, p.weight.cols, p.has_bias});
        state_.emplace_back(static_cast<size_t>(moments_ * p.weight.size()), 0.0f);
      }
    }
    ++step_;
    Update(Split(parameters), learning_rate);
    return absl::OkStatus();
  }

  std::string SaveState() const final {
    std::string out;
    PutBytes(out, Heading());
    PutU64(out, static_cast<uint64_t>(step_));
    PutU64(out, shapes_.size());
    for (size_t i = 0; i < shapes_.size(); ++i) {
      PutU64(out, static_cast<uint64_t>(shapes_[i].rows));
      PutU64(out, static_cast<uint64_t>(shapes_[i].cols));
      PutU32(out, shapes_[i].has_bias ? 1 : 0);
      for (float value : state_[i]) PutU32(out, absl::bit_cast<uint32_t>(value));
    }
    return out;
  }

  absl::Status LoadState(absl::string_view state) final {
    Decoder in(state);
    if (const absl::string_view heading = in.Bytes(); heading != Heading()) {
      return absl::InvalidArgumentError(absl::StrCat("optimizer state: expected that of ", Heading(), ", got ",
                                                     heading.empty() ? "something else" : absl::CHexEscape(heading)));
    }
    const auto step = static_cast<int64_t>(in.U64());
    std::vector<Shape> shapes(std::min<uint64_t>(in.U64(), state.size()));
    std::vector<std::vector<float>> moments(shapes.size());
    for (size_t i = 0; i < shapes.size() && in.ok(); ++i) {
      Shape& shape = shapes[i];
      shape.rows = static_cast<int64_t>(in.U64());
      shape.cols = static_cast<int64_t>(in.U64());
      shape.has_bias = in.U32() != 0;
      // Every element takes 4 bytes of `state`. Checking both sides first keeps their product from overflowing.
      const auto limit = static_cast<int64_t>(state.size());
      if (shape.rows < 0 || shape.cols < 0 || shape.rows > limit || shape.cols > limit) return Damaged(state);
      if (shape.rows * shape.cols > limit) return Damaged(state);
      moments[i].resize(static_cast<size_t>(moments_ * shape.rows * shape.cols));
      for (float& value : moments[i]) value = absl::bit_cast<float>(in.U32());
    }
    if (!in.done() || step < 0) return Damaged(state);
    step_ = step;
    shapes_ = std::move(shapes);
    state_ = std::move(moments);
    return absl::OkStatus();
  }

 protected:
  virtual void Update(const std::vector<Tensor>& tensors, double learning_rate) = 0;

  const OptimizerConfig config_;
  int64_t step_ = 0;  // number of the update in progress, from 1

 private:
  struct Shape {
    int64_t rows, cols;
    bool has_bias;
  };

  std::string Heading() const { return absl::StrCat("precondor optimizer 1 ", config_.name); }
  static absl::Status Damaged(absl::string_view state) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer state: damaged or cut short, got ", state.size(), " bytes"));
  }

  absl::Status CheckShapes(absl::Span<const Parameter> parameters) const {
    if (step_ > 0 && parameters.size() != shapes_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("optimizer: expected ", shapes_.size(), " parameters as at first, got ", parameters.size()));
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& p = parameters[i];
      if (p.gradient.rows != p.weight.rows || p.gradient.cols != p.weight.cols) {
        return absl::InvalidArgumentError(absl::StrCat("parameter ", i, ": weight is [", p.weight.rows, ", ",
                                                       p.weight.cols, "], gradient is [", p.gradient.rows, ", ",
                                                       p.gradient.cols, "]"));
      }
      if (step_ == 0) continue;
      const Shape& shape = shapes_[i];
      if (p.weight.rows != shape.rows || p.weight.cols != shape.cols || p.has_bias != shape.has_bias) {
        return absl::InvalidArgumentError(absl::StrCat(
            "parameter ", i, ": expected [", shape.rows, ", ", shape.cols, "]", shape.has_bias ? " with bias" : "",
            " as at first, got [", p.weight.rows, ", ", p.weight.cols, "]", p.has_bias ? " with bias" : ""));
      }
    }
    return absl::OkStatus();
  }

  std::vector<Tensor> Split(absl::Span<const Parameter> parameters) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& p = parameters[i];
      const int64_t cols = p.weight.cols;
      const int64_t bias = p.has_bias ? 1 : 0;
      float* state = state_[i].data();
      if (cols > bias) {
        tensors.push_back({Columns(p.weight, 0, cols - bias), Columns(p.gradient, 0, cols - bias), state, cols,
                           p.weight.size(), config_.weight_decay});
      }
      if (bias > 0) {
        tensors.push_back({Columns(p.weight, cols - 1, 1), Columns(p.gradient, cols - 1, 1), state + cols - 1, cols,
                           p.weight.size(), 0.0});
      }
    }
    return tensors;
  }

  const int moments_;
  std::vector<Shape> shapes_;
  std::vector<std::vector<float>> state_;  // per parameter: `moments_` matrices of its shape
};

// d = g + decay w; b = momentum b + d (b = d at first); w -= lr (nesterov ? d + momentum b : b).
class Sgd final : public OptimizerBase {
 public:
  explicit Sgd(OptimizerConfig config) : OptimizerBase(std::move(config), 1) {}

 private:
  void Update(const std::vector<Tensor>& tensors, double learning_rate) override {
    for (const Tensor& t : tensors) {
      const float decay = static_cast<float>(t.decay);
      for (int64_t i = 0; i < t.rows(); ++i) {
        UpdateRow(t.cols(), decay, static_cast<float>(learning_rate), t.gradient.row(i), t.moment(0, i),
                  t.weight.row(i));
      }
    }
  }

  void UpdateRow(int64_t n, float decay, float rate, const float* __restrict g, float* __restrict b,
                 float* __restrict w) const {
    const float momentum = static_cast<float>(config_.momentum);
    for (int64_t j = 0; j < n; ++j) {
      const float d = g[j] + decay * w[j];
      b[j] = momentum * b[j] + d;  // b is 0 before the first step, so that b = d
      w[j] -= rate * (config_.nesterov ? d + momentum * b[j] : b[j]);
    }
  }
};

// The first and second moments that AdamW and LAMB share.
struct Moments {
  float beta1, beta2;
  float rest1, rest2;              // 1 - beta
  float correction1, correction2;  // 1 - beta^step
  float epsilon;

  Moments(const OptimizerConfig& config, int64_t step)
      : beta1(static_cast<float>(config.beta1)),
        beta2(static_cast<float>(config.beta2)),
        rest1(static_cast<float>(1.0 - config.beta1)),
        rest2(static_cast<float>(1.0 - config.beta2)),
        correction1(static_cast<float>(1.0 - std::pow(config.beta1, static_cast<double>(step)))),
        correction2(static_cast<float>(1.0 - std::pow(config.beta2, static_cast<double>(step)))),
        epsilon(static_cast<float>(*config.epsilon)) {}

  // Updates m and v with g and returns the bias-corrected m / (sqrt(v) + epsilon).
  float Advance(float g, float& m, float& v) const {
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * g * g;
    return (m / correction1) / (std::sqrt(v / correction2) + epsilon);
  }
};

// w = (1 - lr decay) w - lr m^ / (sqrt(v^) + epsilon).
class AdamW final : public OptimizerBase {
 public:
  explicit AdamW(OptimizerConfig config) : OptimizerBase(std::move(config), 2) {}

 private:
  void Update(const std::vector<Tensor>& tensors, double learning_rate) override {
    const Moments moments(config_, step_);
    const float rate = static_cast<float>(learning_rate);
    for (const Tensor& t : tensors) {
      const float keep = static_cast<float>(1.0 - learning_rate * t.decay);
      for (int64_t i = 0; i < t.rows(); ++i) {
        const float* __restrict g = t.gradient.row(i);
        float* __restrict m = t.moment(0, i);
        float* __restrict v = t.moment(1, i);
        float* __restrict w = t.weight.row(i);
        for (int64_t j = 0; j < t.cols(); ++j) w[j] = keep * w[j] - rate * moments.Advance(g[j], m[j], v[j]);
      }
    }
  }
};

// All gradients divided by max(1, |all gradients| / max_grad_norm); per tensor u = m^ / (sqrt(v^) + epsilon) + decay w,
// w -= lr ratio u with ratio = |w| / |u| where there is decay (or nvlamb) and both norms are not 0, else 1.
class Lamb final : public OptimizerBase {
 public:
  explicit Lamb(OptimizerConfig config) : OptimizerBase(std::move(config), 2) {}

 private:
  void Update(const std::vector<Tensor>& tensors, double learning_rate) override {
    const Moments moments(config_, step_);
    const float divisor = static_cast<float>(ClipDivisor(tensors));
    for (const Tensor& t : tensors) {
      update_.resize(static_cast<size_t>(std::max<int64_t>(update_.size(), t.weight.size())));
      const MatrixView u(update_.data(), t.rows(), t.cols());
      const float decay = static_cast<float>(t.decay);
      for (int64_t i = 0; i < t.rows(); ++i) {
        const float* __restrict g = t.gradient.row(i);
        float* __restrict m = t.moment(0, i);
        float* __restrict v = t.moment(1, i);
        const float* __restrict w = t.weight.row(i);
        float* __restrict out = u.row(i);
        for (int64_t j = 0; j < t.cols(); ++j) out[j] = moments.Advance(g[j] / divisor, m[j], v[j]) + decay * w[j];
      }
      const float rate = static_cast<float>(learning_rate * TrustRatio(t, u));
      for (int64_t i = 0; i < t.rows(); ++i) {
        const float* __restrict from = u.row(i);
        float* __restrict w = t.weight.row(i);
        for (int64_t j = 0; j < t.cols(); ++j) w[j] -= rate * from[j];
      }
    }
  }

  double ClipDivisor(const std::vector<Tensor>& tensors) const {
    if (config_.max_grad_norm == 0) return 1.0;
    double squares = 0;
    for (const Tensor& t : tensors) squares += SquaredNorm(t.gradient);
    return std::max(1.0, std::sqrt(squares) / config_.max_grad_norm);
  }

  double TrustRatio(const Tensor& t, ConstMatrixView u) const {
    if (t.decay == 0 && !config_.nvlamb) return 1.0;
    const double weight_norm = std::sqrt(SquaredNorm(t.weight));
    const double update_norm = std::sqrt(SquaredNorm(u));
    return weight_norm != 0 && update_norm != 0 ? weight_norm / update_norm : 1.0;
  }

  std::vector<float> update_;  // scratch of one tensor
};

absl::Status CheckRange(const char* name, double value, double low, double high, bool low_included) {
  const bool above = low_included ? value >= low : value > low;
  if (above && value < high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": expected a number in ", low_included ? "[" : "(", low, ", ", high, "), got ", value));
}

absl::Status CheckConfig(const OptimizerConfig& config) {
  constexpr double kHuge = 1e30;
  absl::Status status = CheckRange("momentum", config.momentum, 0, 1, true);
  status.Update(CheckRange("beta1", config.beta1, 0, 1, true));
  status.Update(CheckRange("beta2", config.beta2, 0, 1, true));
  status.Update(CheckRange("epsilon", *config.epsilon, 0, kHuge, false));
  status.Update(CheckRange("weight_decay", config.weight_decay, 0, kHuge, true));
  status.Update(CheckRange("max_grad_norm", config.max_grad_norm, 0, kHuge, true));
  if (config.nesterov && config.momentum == 0) {
    status.Update(absl::InvalidArgumentError("nesterov: expected a momentum above 0, got 0"));
  }
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> MakeOptimizer(const OptimizerConfig& given) {
  OptimizerConfig config = given;
  if (!config.epsilon.has_value()) config.epsilon = config.name == "lamb" ? 1e-6 : 1e-8;
  PRECONDOR_RETURN_IF_ERROR(CheckConfig(config));
  if (config.name == "sgd") return std::make_unique<Sgd>(std::move(config));
  if (config.name == "adamw") return std::make_unique<AdamW>(std::move(config));
  if (config.name == "lamb") return std::make_unique<Lamb>(std::move(config));
  return absl::InvalidArgumentError(absl::StrCat("name: expected sgd, adamw or lamb, got \"", given.name, "\""));
}

}  // namespace precondor

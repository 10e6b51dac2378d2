// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/check.h"

namespace precondor {
namespace {

constexpr double kMomentum = 0.9, kBeta1 = 0.9, kBeta2 = 0.999;
constexpr double kMaxGradientNorm = 1.0;  // of lamb, of all gradients together

// b = momentum b + g, which is g at first; w -= lr b.
void Sgd(int64_t n, float momentum, float rate, const float* __restrict g, float* __restrict b, float* __restrict w) {
  for (int64_t j = 0; j < n; ++j) {
    b[j] = momentum * b[j] + g[j];
    w[j] -= rate * b[j];
  }
}

// The first and second moments that AdamW and LAMB share.
struct Moments {
  float beta1 = kBeta1, beta2 = kBeta2;
  float rest1 = static_cast<float>(1.0 - kBeta1), rest2 = static_cast<float>(1.0 - kBeta2);
  float correction1, correction2;  // 1 - beta^step
  float epsilon;

  Moments(int64_t step, double given_epsilon)
      : correction1(static_cast<float>(1.0 - std::pow(kBeta1, static_cast<double>(step)))),
        correction2(static_cast<float>(1.0 - std::pow(kBeta2, static_cast<double>(step)))),
        epsilon(static_cast<float>(given_epsilon)) {}

  // Updates m and v with g and returns the bias-corrected m / (sqrt(v) + epsilon).
  float Advance(float g, float& m, float& v) const {
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * g * g;
    return (m / correction1) / (std::sqrt(v / correction2) + epsilon);
  }
};

void AdamW(int64_t n, const Moments& moments, float rate, const float* __restrict g, float* __restrict m,
           float* __restrict v, float* __restrict w) {
  for (int64_t j = 0; j < n; ++j) w[j] -= rate * moments.Advance(g[j], m[j], v[j]);
}

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

}  // namespace

absl::StatusOr<Optimizer> Optimizer::Make(absl::string_view name) {
  for (const char* one : {"adamw", "lamb", "sgd", "plain"}) {
    if (name == one) return Optimizer(name);
  }
  return absl::NotFoundError(absl::StrCat("no optimizer ", name));
}

void Optimizer::Step(absl::Span<const Parameter> parameters, double learning_rate) {
  moments_.resize(parameters.size());
  ++step_;
  double squares = 0;  // each weight proper and each bias column is a tensor
  for (const auto& [weight, gradient] : parameters) {
    PRECONDOR_CHECK(weight.stride == weight.cols && gradient.stride == weight.cols && gradient.rows == weight.rows);
    squares += SquaredNorm(Columns(gradient, 0, weight.cols - 1));
    squares += SquaredNorm(Columns(gradient, weight.cols - 1, 1));
  }
  const float divisor = static_cast<float>(std::max(1.0, std::sqrt(squares) / kMaxGradientNorm));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    const int64_t n = p.weight.size();
    moments_[i].resize(static_cast<size_t>(2 * n));
    float *m = moments_[i].data(), *v = m + n;
    const float rate = static_cast<float>(learning_rate);
    if (name_ == "adamw") {
      AdamW(n, Moments(step_, 1e-8), rate, p.gradient.data, m, v, p.weight.data);
    } else if (name_ == "lamb") {
      Lamb(p, divisor, learning_rate, m, v);
    } else {
      Sgd(n, name_ == "sgd" ? static_cast<float>(kMomentum) : 0.0f, rate, p.gradient.data, m, p.weight.data);
    }
  }
}

// All gradients divided by max(1, |all gradients|); of each tensor u = m^ / (sqrt(v^) + epsilon), and w -= lr |w| / |u|
// u where both norms are not 0, else w -= lr u.
void Optimizer::Lamb(const Parameter& parameter, float divisor, double learning_rate, float* m, float* v) {
  const Moments moments(step_, 1e-6);
  std::vector<float> update(static_cast<size_t>(parameter.weight.size()));
  for (size_t j = 0; j < update.size(); ++j) {
    update[j] = moments.Advance(parameter.gradient.data[j] / divisor, m[j], v[j]);
  }
  const MatrixView all(update.data(), parameter.weight.rows, parameter.weight.cols);
  const int64_t inputs = all.cols - 1;
  for (const auto& [begin, count] : {std::pair(int64_t{0}, inputs), std::pair(inputs, int64_t{1})}) {
    const MatrixView w = Columns(parameter.weight, begin, count), u = Columns(all, begin, count);
    const double weight_norm = std::sqrt(SquaredNorm(w)), update_norm = std::sqrt(SquaredNorm(u));
    const double ratio = weight_norm != 0 && update_norm != 0 ? weight_norm / update_norm : 1.0;
    const float rate = static_cast<float>(learning_rate * ratio);
    for (int64_t i = 0; i < w.rows; ++i) {
      for (int64_t j = 0; j < w.cols; ++j) w.at(i, j) -= rate * u.at(i, j);
    }
  }
}

std::string Optimizer::SaveState() const {
  std::string out;
  PutU64(out, static_cast<uint64_t>(step_));
  for (const std::vector<float>& moments : moments_) {
    PutBytes(out, absl::string_view(reinterpret_cast<const char*>(moments.data()), moments.size() * sizeof(float)));
  }
  return out;
}

absl::Status Optimizer::LoadState(absl::string_view state) {
  Decoder in(state);
  step_ = static_cast<int64_t>(in.U64());
  for (moments_.clear(); in.ok() && !in.done();) {
    const absl::string_view bytes = in.Bytes();
    std::vector<float>& moments = moments_.emplace_back(bytes.size() / sizeof(float));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(moments.data()));
  }
  return in.done() ? absl::OkStatus() : absl::DataLossError("the optimizer's state is cut short");
}

}  // namespace precondor

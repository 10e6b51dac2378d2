// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/muon.h"

#include <algorithm>
#include <cmath>

namespace precondor::reference {
namespace {

Dense NewtonSchulz(const Dense& g, int iterations, double epsilon) {
  const double a = 3.4445, b = -4.7750, c = 2.0315;
  Dense x = Combination(1 / (FrobeniusNorm(g) + epsilon), g, 0.0, g);
  const bool tall = g.rows > g.cols;
  if (tall) x = Transposed(x);
  for (int i = 0; i < iterations; ++i) {
    const Dense gram = Product(x, Transposed(x));
    const Dense polynomial = Combination(b, gram, c, Product(gram, gram));
    x = Combination(a, x, 1.0, Product(polynomial, x));
  }
  return tall ? Transposed(x) : x;
}

}  // namespace

void Muon::Learn(const Dense& gradient) {
  const double decay = options_.covariance_decay;
  covariance_ = Combination(decay, covariance_, 1 - decay, Product(Transposed(gradient), gradient));
  const double mean = Trace(covariance_) / static_cast<double>(gradient.cols);
  if (steps_++ % options_.refresh_interval != 0 || mean == 0) return;
  inverse_ = SpdInverse(Combination(1 / mean, covariance_, options_.damping, Identity(gradient.cols)));
}

Dense Muon::Step(const Dense& gradient) {
  momentum_ = Combination(options_.beta, momentum_, 1.0, gradient);
  direction_ = options_.nesterov ? Combination(1.0, gradient, options_.beta, momentum_) : momentum_;
  if (options_.input_factor) {
    direction_ = Product(direction_, inverse_);
    Learn(gradient);
  }
  if (FrobeniusNorm(direction_) == 0) return direction_;
  const auto d_out = static_cast<double>(gradient.rows), d_in = static_cast<double>(gradient.cols);
  const double scale =
      options_.original_scale ? std::sqrt(std::max(1.0, d_out / d_in)) : 0.2 * std::sqrt(std::max(d_out, d_in));
  return Combination(scale, NewtonSchulz(direction_, options_.iterations, options_.epsilon), 0.0, gradient);
}

}  // namespace precondor::reference

// SPDX-License-Identifier: Apache-2.0
// Gradients for methods that learn from gradients alone: reproducible, of a known covariance.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

#include "tests/reference/naive_linear_algebra.h"

namespace precondor {

// D = L N R + a common mean, N standard normal, with L and R of a spread spectrum along no axis. A function of (m, n,
// seed, scale, mean) alone; elements are rounded to f32.
class GradientStream {
 public:
  GradientStream(int64_t m, int64_t n, uint64_t seed, double scale = 1.0, double mean = 0.3)
      : random_(seed), scale_(scale), mean_weight_(mean), mean_(Gaussian(m, n)), left_(Mixing(m)), right_(Mixing(n)) {}

  reference::Dense Next() {
    const reference::Dense noise =
        reference::Product(reference::Product(left_, Gaussian(left_.rows, right_.rows)), right_);
    reference::Dense d = reference::Combination(scale_, noise, mean_weight_ * scale_, mean_);
    for (double& element : d.data) element = static_cast<float>(element);
    return d;
  }

  reference::Dense Gaussian(int64_t m, int64_t n) {
    reference::Dense x(m, n);
    for (double& element : x.data) element = static_cast<float>(normal_(random_));
    return x;
  }

 private:
  // Singular values from 1 down to about 1/30, in a basis of their own.
  reference::Dense Mixing(int64_t n) {
    reference::Dense diagonal(n, n), v = Gaussian(n, 1);
    const double norm = reference::FrobeniusNorm(v);
    for (int64_t i = 0; i < n; ++i) {
      diagonal.at(i, i) = std::exp(-3.4 * static_cast<double>(i) / static_cast<double>(n));
    }
    const reference::Dense reflection = reference::Combination(1.0, reference::Identity(n), -2 / (norm * norm),
                                                               reference::Product(v, reference::Transposed(v)));
    return reference::Product(reference::Product(reflection, diagonal), reflection);
  }

  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  const double scale_, mean_weight_;
  const reference::Dense mean_;
  const reference::Dense left_, right_;
};

}  // namespace precondor

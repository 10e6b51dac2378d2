// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/kfac.h"

#include <cmath>

namespace precondor::reference {
namespace {

double MeanDiagonal(const Dense& a) {
  double sum = 0;
  for (int64_t i = 0; i < a.rows; ++i) sum += a.at(i, i);
  return sum / static_cast<double>(a.rows);
}

Dense Damped(const Dense& a, double damping) { return Combination(1, a, damping, Identity(a.rows)); }

}  // namespace

Dense SecondMoment(const Vectors& vectors) {
  const auto d = static_cast<int64_t>(vectors[0].size());
  Dense out(d, d);
  for (const Vector& v : vectors) {
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t j = 0; j < d; ++j) out.at(i, j) += v[i] * v[j] / static_cast<double>(vectors.size());
    }
  }
  return out;
}

Vector PackedLower(const Dense& a) {
  Vector out;
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j <= i; ++j) out.push_back(a.at(i, j));
  }
  return out;
}

Kfac::Kfac(const KfacOptions& options, int64_t d_out, int64_t d_in)
    : options_(options), d_out_(d_out), d_in_(d_in), a_(Identity(d_in)), g_(Identity(d_out)) {}

void Kfac::Update(const Dense& a, const Dense& g) {
  const uint64_t t = updates_++;
  if (t % options_.factor_update_steps(t) == 0) {
    if (accumulated_ == 0) decay_ = options_.factor_decay(t);
    const double keep = accumulated_ == 0 ? decay_ : 1.0;
    const double add = (1 - decay_) / static_cast<double>(options_.accumulation_steps);
    a_ = Combination(keep, a_, add, a);
    g_ = Combination(keep, g_, add / (options_.row_scale * options_.row_scale), g);
    accumulated_ = (accumulated_ + 1) % options_.accumulation_steps;
  }
  waiting_ = waiting_ || !ready_ || t % options_.inv_update_steps(t) == 0;
  if (next_decomposed_.has_value() && next_decomposed_->at + options_.refresh_lag == t) {
    decomposed_ = *next_decomposed_;
    next_decomposed_.reset();
  }
  if (!waiting_ || accumulated_ != 0 || next_decomposed_.has_value()) return;
  waiting_ = false;
  next_decomposed_ = Decomposed{a_, g_, options_.damping(t), std::sqrt(MeanDiagonal(a_) / MeanDiagonal(g_)), t};
  if (ready_ && options_.refresh_lag > 0) return;
  ready_ = true;
  decomposed_ = *next_decomposed_;
  next_decomposed_.reset();
}

Vector Kfac::Precondition(const Vector& d) const {
  if (!ready_) return d;
  const bool fixed = options_.inverse || options_.prediv;
  const double damping = fixed ? decomposed_.damping : options_.damping(updates_ - 1);
  double in = damping, out = damping;
  if (options_.pi_split) {
    in = std::sqrt(damping) * decomposed_.pi;
    out = std::sqrt(damping) / decomposed_.pi;
  }
  Dense gradient(d_out_, d_in_);
  gradient.data = d;
  if (options_.inverse || options_.pi_split) {
    return Product(Product(SpdInverse(Damped(decomposed_.g, out)), gradient), SpdInverse(Damped(decomposed_.a, in)))
        .data;
  }
  const int64_t n = d_out_ * d_in_;
  Dense system(n, n), right(n, 1);
  right.data = d;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      system.at(i, j) =
          decomposed_.g.at(i / d_in_, j / d_in_) * decomposed_.a.at(i % d_in_, j % d_in_) + (i == j ? damping : 0.0);
    }
  }
  return Product(SpdInverse(system), right).data;
}

}  // namespace precondor::reference

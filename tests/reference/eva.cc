// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/eva.h"

#include <cstddef>

namespace precondor::reference {
namespace {

void Mix(double weight, const Vectors& vectors, Vector& mean) {
  Vector next(vectors[0].size(), 0.0);
  for (const Vector& v : vectors) {
    for (std::size_t i = 0; i < v.size(); ++i) next[i] += v[i] / static_cast<double>(vectors.size());
  }
  if (!mean.empty()) {
    for (std::size_t i = 0; i < next.size(); ++i) next[i] = weight * next[i] + (1 - weight) * mean[i];
  }
  mean = next;
}

double Square(const Vector& v) {
  double sum = 0;
  for (double x : v) sum += x * x;
  return sum;
}

}  // namespace

void Eva::Update(const Vectors& a, const Vectors& g) {
  Vectors own = g;
  for (Vector& v : own) {
    for (double& x : v) x /= options_.row_scale;
  }
  Mix(options_.weight, a, a_);
  Mix(options_.weight, own, g_);
}

Vector Eva::Precondition(const Vector& d) const {
  if (a_.empty()) return d;
  double inner = 0;
  for (int64_t i = 0; i < d_out_; ++i) {
    for (int64_t j = 0; j < d_in_; ++j) inner += g_[i] * d[i * d_in_ + j] * a_[j];
  }
  const double factor = inner / (Square(a_) * Square(g_) + options_.mu);
  Vector u = d;
  for (int64_t i = 0; i < d_out_; ++i) {
    for (int64_t j = 0; j < d_in_; ++j) u[i * d_in_ + j] = (d[i * d_in_ + j] - factor * g_[i] * a_[j]) / options_.mu;
  }
  return u;
}

Vector Eva::Solve(const Vector& d) const {
  const int64_t n = d_out_ * d_in_;
  Dense fisher(n, n), right(n, 1);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      fisher.at(i, j) = g_[i / d_in_] * a_[i % d_in_] * g_[j / d_in_] * a_[j % d_in_] + (i == j ? options_.mu : 0.0);
    }
    right.at(i, 0) = d[i];
  }
  return Product(SpdInverse(fisher), right).data;
}

}  // namespace precondor::reference

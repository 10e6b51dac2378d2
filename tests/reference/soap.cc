// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/soap.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace precondor::reference {
namespace {

Dense Scaled(double factor, const Dense& a) { return Combination(factor, a, 0.0, a); }

Dense PickColumns(const Dense& a, const std::vector<int64_t>& order) {
  Dense out(a.rows, a.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) out.at(i, j) = a.at(i, order[j]);
  }
  return out;
}

std::vector<int64_t> FallingOrder(const Vector& values) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return values[i] > values[j]; });
  return order;
}

// Orthogonal iteration; `order` is the sorting's.
Dense Iterated(const Dense& covariance, const Dense& basis, std::vector<int64_t>& order) {
  const Dense product = Product(covariance, basis);
  Vector estimates(basis.cols, 0.0);
  for (int64_t j = 0; j < basis.cols; ++j) {
    for (int64_t i = 0; i < basis.rows; ++i) estimates[j] += basis.at(i, j) * product.at(i, j);
  }
  order = FallingOrder(estimates);
  return OrthonormalColumns(PickColumns(product, order));
}

}  // namespace

Dense FallingEigenvectors(const Dense& a, Vector* values) {
  const int64_t n = a.rows;
  Dense b = a, vectors = Identity(n);
  for (int sweep = 0; sweep < 60; ++sweep) {
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (std::fabs(b.at(p, q)) < 1e-300) continue;
        const double angle = 0.5 * std::atan2(2 * b.at(p, q), b.at(p, p) - b.at(q, q));
        const double c = std::cos(angle), s = std::sin(angle);
        for (int64_t k = 0; k < n; ++k) {
          const double x = b.at(k, p), y = b.at(k, q);
          b.at(k, p) = c * x + s * y;
          b.at(k, q) = c * y - s * x;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = b.at(p, k), y = b.at(q, k);
          b.at(p, k) = c * x + s * y;
          b.at(q, k) = c * y - s * x;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = vectors.at(k, p), y = vectors.at(k, q);
          vectors.at(k, p) = c * x + s * y;
          vectors.at(k, q) = c * y - s * x;
        }
      }
    }
  }
  Vector diagonal(n);
  for (int64_t i = 0; i < n; ++i) diagonal[i] = b.at(i, i);
  const std::vector<int64_t> order = FallingOrder(diagonal);
  if (values != nullptr) {
    values->resize(n);
    for (int64_t i = 0; i < n; ++i) (*values)[i] = diagonal[order[i]];
  }
  return PickColumns(vectors, order);
}

Dense OrthonormalColumns(const Dense& a) {
  Dense q = a;
  for (int64_t j = 0; j < q.cols; ++j) {
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t k = 0; k < j; ++k) {
        double inner = 0;
        for (int64_t i = 0; i < q.rows; ++i) inner += q.at(i, k) * q.at(i, j);
        for (int64_t i = 0; i < q.rows; ++i) q.at(i, j) -= inner * q.at(i, k);
      }
    }
    double square = 0;
    for (int64_t i = 0; i < q.rows; ++i) square += q.at(i, j) * q.at(i, j);
    for (int64_t i = 0; i < q.rows; ++i) q.at(i, j) /= std::sqrt(square);
  }
  return q;
}

Soap::Soap(SoapOptions options, Dense first_left, Dense first_right)
    : options_(options), left_basis_(std::move(first_left)), right_basis_(std::move(first_right)) {}

Dense Soap::Project(const Dense& x) const {
  Dense y = x;
  if (options_.left) y = Product(Transposed(left_basis_), y);
  if (options_.right) y = Product(y, right_basis_);
  return y;
}

Dense Soap::Back(const Dense& x) const {
  Dense y = x;
  if (options_.left) y = Product(left_basis_, y);
  if (options_.right) y = Product(y, Transposed(right_basis_));
  return y;
}

void Soap::Refresh() {
  const Dense plain = Back(momentum_);
  std::vector<int64_t> rows(second_.rows), cols(second_.cols);
  std::iota(rows.begin(), rows.end(), int64_t{0});
  std::iota(cols.begin(), cols.end(), int64_t{0});
  if (options_.left) left_basis_ = Iterated(left_, left_basis_, rows);
  if (options_.right) right_basis_ = Iterated(right_, right_basis_, cols);
  const Dense second = second_;
  for (int64_t i = 0; i < second.rows; ++i) {
    for (int64_t j = 0; j < second.cols; ++j) second_.at(i, j) = second.at(rows[i], cols[j]);
  }
  momentum_ = Project(plain);
}

Dense Soap::Step(const Dense& d) {
  Dense u(d.rows, d.cols);
  const double decay = options_.covariance_decay;
  if (++steps_ == 0) {
    left_ = Dense(d.rows, d.rows);
    right_ = Dense(d.cols, d.cols);
    momentum_ = second_ = u;
  } else {
    const Dense x = Project(d);
    momentum_ = Combination(options_.beta1, momentum_, 1 - options_.beta1, x);
    for (size_t i = 0; i < x.data.size(); ++i) {
      second_.data[i] = options_.beta2 * second_.data[i] + (1 - options_.beta2) * x.data[i] * x.data[i];
    }
    const double n = static_cast<double>(steps_);
    const double scale = std::sqrt(1 - std::pow(options_.beta2, n)) / (1 - std::pow(options_.beta1, n));
    Dense ratio = momentum_;
    for (size_t i = 0; i < ratio.data.size(); ++i) {
      ratio.data[i] *= scale / (std::sqrt(second_.data[i]) + options_.epsilon);
    }
    u = Back(ratio);
  }
  left_ = Combination(decay, left_, 1 - decay, Product(d, Transposed(d)));
  right_ = Combination(decay, right_, 1 - decay, Product(Transposed(d), d));
  if (steps_ > 0 && steps_ % options_.interval == 0) Refresh();
  return u;
}

Dense Shampoo::Root(const Dense& covariance, double power) const {
  Vector values;
  const Dense q = FallingEigenvectors(covariance, &values);
  Dense scaled = q;
  for (int64_t j = 0; j < q.cols; ++j) {
    const double factor = std::pow(std::max(values[j], 0.0) + options_.epsilon * values[0], -power);
    for (int64_t i = 0; i < q.rows; ++i) scaled.at(i, j) *= factor;
  }
  return Product(scaled, Transposed(q));
}

Dense Shampoo::Step(const Dense& d) {
  if (steps_ == 0) {
    left_ = Dense(d.rows, d.rows);
    right_ = Dense(d.cols, d.cols);
    momentum_ = Dense(d.rows, d.cols);
  }
  const double decay = options_.covariance_decay;
  left_ = Combination(decay, left_, 1 - decay, Product(d, Transposed(d)));
  right_ = Combination(decay, right_, 1 - decay, Product(Transposed(d), d));
  momentum_ = Combination(options_.beta1, momentum_, 1 - options_.beta1, d);
  const double power = options_.left && options_.right ? 0.25 : 0.5;
  if (steps_ % options_.interval == 0) {
    const double debias = 1 / (1 - std::pow(decay, static_cast<double>(steps_ + 1)));
    left_root_ = Root(Scaled(debias, left_), power);
    right_root_ = Root(Scaled(debias, right_), power);
  }
  ++steps_;
  Dense u = Scaled(1 / (1 - std::pow(options_.beta1, static_cast<double>(steps_))), momentum_);
  if (options_.left) u = Product(left_root_, u);
  if (options_.right) u = Product(u, right_root_);
  return u;
}

}  // namespace precondor::reference

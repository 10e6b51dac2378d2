// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/soap.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace precondor::reference {
namespace {

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

// One for each dimension, all zero.
std::vector<Dense> ZeroCovariances(const std::vector<int64_t>& dims) {
  std::vector<Dense> all;
  all.reserve(dims.size());
  for (const int64_t d : dims) all.emplace_back(d, d);
  return all;
}

Tensor AsTensor(const std::vector<int64_t>& dims, const Vector& data) {
  Tensor x(dims);
  x.data = data;
  return x;
}

void TakeIn(const Tensor& d, double decay, std::vector<Dense>& covariances) {
  for (size_t k = 0; k < covariances.size(); ++k) {
    covariances[k] = Combination(decay, covariances[k], 1 - decay, ModeGram(d, k));
  }
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

Soap::Soap(SoapOptions options, std::vector<Dense> first_bases)
    : options_(std::move(options)),
      bases_(std::move(first_bases)),
      covariances_(ZeroCovariances(options_.dims)),
      momentum_(options_.dims),
      second_(options_.dims) {}

Tensor Soap::Project(const Tensor& x) const {
  Tensor y = x;
  for (size_t k = 0; k < bases_.size(); ++k) {
    if (options_.factor[k]) y = ModeProduct(Transposed(bases_[k]), k, y);
  }
  return y;
}

Tensor Soap::Back(const Tensor& x) const {
  Tensor y = x;
  for (size_t k = 0; k < bases_.size(); ++k) {
    if (options_.factor[k]) y = ModeProduct(bases_[k], k, y);
  }
  return y;
}

void Soap::Refresh() {
  const Tensor plain = Back(momentum_);
  for (size_t k = 0; k < bases_.size(); ++k) {
    if (!options_.factor[k]) continue;
    std::vector<int64_t> order;
    bases_[k] = Iterated(covariances_[k], bases_[k], order);
    second_ = ModeReordered(order, k, second_);
  }
  momentum_ = Project(plain);
}

Vector Soap::Step(const Vector& gradient) {
  const Tensor d = AsTensor(options_.dims, gradient);
  Tensor u(options_.dims);
  if (++steps_ > 0) {
    const Tensor x = Project(d);
    const double n = static_cast<double>(steps_);
    const double scale = std::sqrt(1 - std::pow(options_.beta2, n)) / (1 - std::pow(options_.beta1, n));
    Tensor ratio(options_.dims);
    for (size_t i = 0; i < x.data.size(); ++i) {
      momentum_.data[i] = options_.beta1 * momentum_.data[i] + (1 - options_.beta1) * x.data[i];
      second_.data[i] = options_.beta2 * second_.data[i] + (1 - options_.beta2) * x.data[i] * x.data[i];
      ratio.data[i] = scale * momentum_.data[i] / (std::sqrt(second_.data[i]) + options_.epsilon);
    }
    u = Back(ratio);
  }
  TakeIn(d, options_.covariance_decay, covariances_);
  if (steps_ > 0 && steps_ % options_.interval == 0) Refresh();
  return u.data;
}

Shampoo::Shampoo(SoapOptions options)
    : options_(std::move(options)),
      covariances_(ZeroCovariances(options_.dims)),
      roots_(ZeroCovariances(options_.dims)),
      momentum_(options_.dims) {}

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

Vector Shampoo::Step(const Vector& gradient) {
  const Tensor d = AsTensor(options_.dims, gradient);
  TakeIn(d, options_.covariance_decay, covariances_);
  for (size_t i = 0; i < d.data.size(); ++i) {
    momentum_.data[i] = options_.beta1 * momentum_.data[i] + (1 - options_.beta1) * d.data[i];
  }
  const auto factors = static_cast<double>(std::count(options_.factor.begin(), options_.factor.end(), true));
  const bool due = steps_++ % options_.interval == 0;
  const double n = static_cast<double>(steps_);
  Tensor u = momentum_;
  for (double& element : u.data) element /= 1 - std::pow(options_.beta1, n);
  for (size_t k = 0; k < roots_.size(); ++k) {
    if (!options_.factor[k]) continue;
    const double debias = 1 / (1 - std::pow(options_.covariance_decay, n));
    if (due) roots_[k] = Root(Scaled(debias, covariances_[k]), 1 / (2 * factors));
    u = ModeProduct(roots_[k], k, u);
  }
  return u.data;
}

}  // namespace precondor::reference

// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/kron.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace precondor::reference {
namespace {

Dense Add(const Dense& a, const Dense& b) { return Combination(1.0, a, 1.0, b); }
Dense Subtract(const Dense& a, const Dense& b) { return Combination(1.0, a, -1.0, b); }

Dense UpperInverse(const Dense& a) {
  Dense x(a.rows, a.rows);
  for (int64_t column = 0; column < a.rows; ++column) {
    for (int64_t i = column; i >= 0; --i) {
      double sum = i == column ? 1.0 : 0.0;
      for (int64_t k = i + 1; k <= column; ++k) sum -= a.at(i, k) * x.at(k, column);
      x.at(i, column) = sum / a.at(i, i);
    }
  }
  return x;
}

Dense Keep(const Dense& a, bool (*keep)(int64_t, int64_t)) {
  Dense out = a;
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) {
      if (!keep(i, j)) out.at(i, j) = 0;
    }
  }
  return out;
}

Dense DiagonalOf(const Dense& a) {
  return Keep(a, [](int64_t i, int64_t j) { return i == j; });
}

double MeanMagnitude(const Vector& a) {
  double sum = 0;
  for (double x : a) sum += std::fabs(x);
  return sum / static_cast<double>(a.size());
}

// The places along each dimension of the element with this number.
std::vector<int64_t> Places(int64_t number, const std::vector<int64_t>& dims) {
  std::vector<int64_t> places(dims.size());
  for (size_t k = dims.size(); k-- > 0; number /= dims[k]) places[k] = number % dims[k];
  return places;
}

int64_t Number(const std::vector<int64_t>& places, const std::vector<int64_t>& dims) {
  int64_t number = 0;
  for (size_t k = 0; k < dims.size(); ++k) number = number * dims[k] + places[k];
  return number;
}

// The block's box of x.
Tensor Part(const Tensor& x, const std::vector<int64_t>& first, const std::vector<int64_t>& dims) {
  Tensor part(dims);
  for (size_t n = 0; n < part.data.size(); ++n) {
    std::vector<int64_t> places = Places(n, dims);
    for (size_t k = 0; k < dims.size(); ++k) places[k] += first[k];
    part.data[n] = x.data[Number(places, x.dims)];
  }
  return part;
}

// Q <- Q - lr/normlb(T1 + T2) triu(T1 - T2) Q, or the diagonal analogue.
Dense TriangularStep(const Dense& q, const Dense& t1, const Dense& t2, double lr, bool diagonal) {
  const Dense sum = Add(t1, t2), difference = Subtract(t1, t2);
  const double norm = diagonal ? LargestElement(DiagonalOf(sum)) : NormLowerBound(sum);
  if (norm == 0) return q;
  const Dense part = diagonal ? DiagonalOf(difference) : Keep(difference, [](int64_t i, int64_t j) { return j >= i; });
  return Subtract(q, Scaled(lr / norm, Product(part, q)));
}

}  // namespace

double NormLowerBound(const Dense& a) {
  int64_t longest = 0;
  double square = 0;
  for (int64_t i = 0; i < a.rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < a.cols; ++j) sum += a.at(i, j) * a.at(i, j);
    if (sum > square) {
      square = sum;
      longest = i;
    }
  }
  if (square == 0) return 0;
  Dense row(1, a.cols);
  for (int64_t j = 0; j < a.cols; ++j) row.at(0, j) = a.at(longest, j);
  const Dense x = Product(row, a);
  return FrobeniusNorm(Product(Scaled(1 / FrobeniusNorm(x), x), Transposed(a)));
}

Kron::Kron(KronOptions options, Probe probe, Draw balances)
    : options_(std::move(options)), probe_(std::move(probe)), balances_(std::move(balances)) {
  std::vector<int64_t> dims;
  size_t count = 1;
  for (const std::vector<int64_t>& lengths : options_.sides) {
    dims.push_back(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
    count *= lengths.size();
  }
  for (size_t number = 0; number < count; ++number) blocks_.push_back(MakeBlock(number));
  momentum_ = Tensor(dims);
}

Kron::Block Kron::MakeBlock(size_t number) const {
  const size_t order = options_.sides.size();
  std::vector<int64_t> counts;
  for (const std::vector<int64_t>& lengths : options_.sides) counts.push_back(lengths.size());
  const std::vector<int64_t> places = Places(number, counts);
  Block block;
  for (size_t k = 0; k < order; ++k) {
    const std::vector<int64_t>& lengths = options_.sides[k];
    block.first.push_back(std::accumulate(lengths.begin(), lengths.begin() + places[k], int64_t{0}));
    block.dims.push_back(lengths[places[k]]);
    block.factors.push_back(
        Scaled(std::pow(options_.init_scale, 1 / static_cast<double>(order)), Identity(block.dims[k])));
  }
  return block;
}

void Kron::Triangular(Block& block, const Tensor& g, const Tensor& v) {
  Tensor a = g, b = v;
  for (size_t k = 0; k < block.dims.size(); ++k) {
    a = ModeProduct(block.factors[k], k, a);
    b = ModeProduct(Transposed(UpperInverse(block.factors[k])), k, b);
  }
  for (size_t k = 0; k < block.dims.size(); ++k) {
    block.factors[k] =
        TriangularStep(block.factors[k], ModeGram(a, k), ModeGram(b, k), options_.lr, options_.diagonal[k]);
  }
}

void Kron::Update(const Tensor& g, double mean) {
  const double damping = std::sqrt(static_cast<double>(std::numeric_limits<float>::epsilon())) * mean;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    Block& block = blocks_[i];
    if (balances_(updates_)) {
      double product = 1;
      for (const Dense& q : block.factors) product *= LargestElement(q);
      const double common = std::pow(product, 1 / static_cast<double>(block.factors.size()));
      for (Dense& q : block.factors) q = Scaled(common / LargestElement(q), q);
    }
    Tensor v(block.dims), damped = Part(g, block.first, block.dims);
    v.data = probe_(updates_, i, static_cast<int64_t>(v.data.size()));
    for (size_t n = 0; n < v.data.size(); ++n) damped.data[n] += damping * v.data[n];
    Triangular(block, damped, v);
  }
  ++updates_;
}

Vector Kron::Step(const Vector& d) {
  ++steps_;
  ++since_;
  Tensor g(momentum_.dims), u(momentum_.dims);
  const double bias = 1 - std::pow(options_.momentum, static_cast<double>(steps_));
  for (size_t n = 0; n < d.size(); ++n) {
    momentum_.data[n] = options_.momentum * momentum_.data[n] + (1 - options_.momentum) * d[n];
    g.data[n] = momentum_.data[n] / bias;
  }
  const double annealed =
      options_.max_probability * std::exp(-options_.decay * (static_cast<double>(steps_) - options_.flat_steps));
  const double probability = std::min(std::max(annealed, options_.min_probability), options_.max_probability);
  if (static_cast<double>(since_) >= 1 / probability) {
    since_ = 0;
    const double mean = MeanMagnitude(g.data);
    if (mean > 0) Update(g, mean);
  }
  double square = 0;
  for (const Block& block : blocks_) {
    Tensor part = Part(g, block.first, block.dims);
    for (size_t k = 0; k < block.dims.size(); ++k) {
      part = ModeProduct(Product(Transposed(block.factors[k]), block.factors[k]), k, part);
    }
    for (size_t n = 0; n < part.data.size(); ++n) {
      std::vector<int64_t> places = Places(n, block.dims);
      for (size_t k = 0; k < places.size(); ++k) places[k] += block.first[k];
      u.data[Number(places, u.dims)] = part.data[n];
      square += part.data[n] * part.data[n];
    }
  }
  const double rms = std::sqrt(square / static_cast<double>(u.data.size()));
  for (double& element : u.data) element *= rms > options_.clip ? options_.clip / rms : 1;
  return u.data;
}

}  // namespace precondor::reference

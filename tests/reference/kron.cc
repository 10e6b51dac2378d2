// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/kron.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace precondor::reference {
namespace {

Dense Scaled(double factor, const Dense& a) { return Combination(factor, a, 0.0, a); }
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

double MeanMagnitude(const Dense& a) {
  double sum = 0;
  for (double x : a.data) sum += std::fabs(x);
  return sum / static_cast<double>(a.data.size());
}

// Q <- Q - lr/normlb(T1 + T2) triu(T1 - T2) Q, or the diagonal analogue.
Dense TriangularStep(const Dense& q, const Dense& t1, const Dense& t2, double lr, bool diagonal) {
  const Dense sum = Add(t1, t2), difference = Subtract(t1, t2);
  const double norm = diagonal ? LargestElement(DiagonalOf(sum)) : NormLowerBound(sum);
  if (norm == 0) return q;
  const Dense part = diagonal ? DiagonalOf(difference) : Keep(difference, [](int64_t i, int64_t j) { return j >= i; });
  return Subtract(q, Scaled(lr / norm, Product(part, q)));
}

Dense Rotated(const Dense& q) {
  Dense r = Subtract(Transposed(q), q);
  const double norm = NormLowerBound(r);
  if (norm == 0) return q;
  r = Scaled(1 / norm, r);
  const Dense rq = Product(r, q), rrq = Product(r, rq);
  const double first = Trace(rq), second = Trace(rrq);
  const double angle = second < 0 ? std::min(-first / second, 0.125) : 0.125;
  return Add(q, Add(Scaled(angle, rq), Scaled(angle * angle / 2, rrq)));
}

Dense ProcrustesStep(const Dense& q, const Dense& t, double elements, double lr, bool diagonal, double& bound) {
  const double target = elements / static_cast<double>(q.rows);
  const double now = (diagonal ? LargestElement(DiagonalOf(t)) : NormLowerBound(t)) + target;
  bound = std::max(0.9 * bound + 0.1 * now, now);
  const Dense error = Subtract(diagonal ? DiagonalOf(t) : t, Scaled(target, Identity(q.rows)));
  const Dense next = Subtract(q, Scaled(lr / bound, Product(error, q)));
  return diagonal ? next : Rotated(next);
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
  const double scale = std::sqrt(options_.init_scale);
  for (const int64_t rows : options_.rows) {
    for (const int64_t cols : options_.cols) {
      blocks_.push_back({Scaled(scale, Identity(rows)), Scaled(scale, Identity(cols))});
    }
  }
  momentum_ = Dense(std::accumulate(options_.rows.begin(), options_.rows.end(), int64_t{0}),
                    std::accumulate(options_.cols.begin(), options_.cols.end(), int64_t{0}));
}

Dense Kron::Tile(const Dense& x, size_t block) const {
  const size_t across = options_.cols.size();
  int64_t row = 0, col = 0;
  for (size_t i = 0; i < block / across; ++i) row += options_.rows[i];
  for (size_t j = 0; j < block % across; ++j) col += options_.cols[j];
  Dense out(options_.rows[block / across], options_.cols[block % across]);
  for (int64_t i = 0; i < out.rows; ++i) {
    for (int64_t j = 0; j < out.cols; ++j) out.at(i, j) = x.at(row + i, col + j);
  }
  return out;
}

void Kron::Triangular(Block& block, const Dense& g, const Dense& v) {
  const Dense a = Product(Product(block.left, g), Transposed(block.right));
  const Dense b = Product(Product(Transposed(UpperInverse(block.left)), v), UpperInverse(block.right));
  const Dense at = Transposed(a), bt = Transposed(b);
  block.left = TriangularStep(block.left, Product(a, at), Product(b, bt), options_.lr, options_.diagonal_rows);
  block.right = TriangularStep(block.right, Product(at, a), Product(bt, b), options_.lr, options_.diagonal_cols);
}

void Kron::Procrustes(Block& block, const Dense& g) {
  const Dense left = Product(Transposed(block.left), block.left), right = Product(Transposed(block.right), block.right);
  const Dense u = Product(Product(left, g), right), ut = Transposed(u);
  const double elements = static_cast<double>(g.data.size());
  block.left =
      ProcrustesStep(block.left, Product(u, ut), elements, options_.lr, options_.diagonal_rows, block.left_bound);
  block.right =
      ProcrustesStep(block.right, Product(ut, u), elements, options_.lr, options_.diagonal_cols, block.right_bound);
}

void Kron::Update(const Dense& g, double mean) {
  const double damping = std::sqrt(static_cast<double>(std::numeric_limits<float>::epsilon())) * mean;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    Block& block = blocks_[i];
    if (balances_(updates_)) {
      const double left = LargestElement(block.left), right = LargestElement(block.right);
      block.left = Scaled(std::sqrt(left * right) / left, block.left);
      block.right = Scaled(std::sqrt(left * right) / right, block.right);
    }
    const Dense v = probe_(updates_, i);
    const Dense damped = Combination(1.0, Tile(g, i), damping, v);
    options_.procrustes ? Procrustes(block, damped) : Triangular(block, damped, v);
  }
  ++updates_;
}

Dense Kron::Step(const Dense& d) {
  ++steps_;
  ++since_;
  momentum_ = Combination(options_.momentum, momentum_, 1 - options_.momentum, d);
  const Dense g = Scaled(1 / (1 - std::pow(options_.momentum, static_cast<double>(steps_))), momentum_);
  const double annealed =
      options_.max_probability * std::exp(-options_.decay * (static_cast<double>(steps_) - options_.flat_steps));
  const double probability = std::min(std::max(annealed, options_.min_probability), options_.max_probability);
  if (static_cast<double>(since_) >= 1 / probability) {
    since_ = 0;
    const double mean = MeanMagnitude(g);
    if (mean > 0) Update(g, mean);
  }
  Dense u(d.rows, d.cols);
  int64_t row = 0;
  for (size_t i = 0; i < options_.rows.size(); ++i) {
    int64_t col = 0;
    for (size_t j = 0; j < options_.cols.size(); ++j) {
      const size_t number = i * options_.cols.size() + j;
      const Block& block = blocks_[number];
      const Dense left = Product(Transposed(block.left), block.left);
      const Dense right = Product(Transposed(block.right), block.right);
      const Dense tile = Product(Product(left, Tile(g, number)), right);
      for (int64_t r = 0; r < tile.rows; ++r) {
        for (int64_t c = 0; c < tile.cols; ++c) u.at(row + r, col + c) = tile.at(r, c);
      }
      col += options_.cols[j];
    }
    row += options_.rows[i];
  }
  const double rms = FrobeniusNorm(u) / std::sqrt(static_cast<double>(u.data.size()));
  return rms > options_.clip ? Scaled(options_.clip / rms, u) : u;
}

}  // namespace precondor::reference

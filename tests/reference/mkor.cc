// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/mkor.h"

#include <algorithm>
#include <cmath>

namespace precondor::reference {
namespace {

double DotProduct(const Vector& x, const Vector& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

Vector Times(const Dense& a, const Vector& x) {
  Vector y(a.rows, 0.0);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) y[i] += a.at(i, j) * x[j];
  }
  return y;
}

// a = keep a + value I
void KeepAndShift(Dense& a, double keep, double value) {
  for (double& element : a.data) element *= keep;
  for (int64_t i = 0; i < a.rows; ++i) a.at(i, i) += value;
}

void AddOuter(Dense& a, double scale, const Vector& x) {
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) a.at(i, j) += scale * x[i] * x[j];
  }
}

double MeanSquare(const Vectors& v) {
  double sum = 0;
  for (const Vector& x : v) sum += DotProduct(x, x);
  return sum / static_cast<double>(v.size());
}

// Rule 2 of the document: H = gamma J + (1-gamma) I, then per vector u = J v, J = J - u u'/(1 + v'u).
void BlendAndShermanMorrison(Dense& j, double gamma, double scale, const Vectors& v) {
  KeepAndShift(j, gamma, 1.0 - gamma);
  for (Vector x : v) {
    for (double& element : x) element *= scale;
    const Vector u = Times(j, x);
    AddOuter(j, -1.0 / (1.0 + DotProduct(x, u)), u);
  }
}

// Algorithm 1 of the paper, lines 5-10; several vectors enter with the mean of their terms. Then the hard cap.
void Published(Dense& j, const MkorOptions& options, const Vectors& v) {
  const double gamma = options.gamma;
  if (LargestElement(j) > options.norm_threshold) KeepAndShift(j, options.zeta, 1.0 - options.zeta);
  Dense next = j;
  KeepAndShift(next, gamma, 0.0);
  for (const Vector& x : v) {
    const Vector u = Times(j, x);
    const double denominator = gamma * gamma * (1.0 + gamma * (1.0 - gamma) * DotProduct(x, u));
    AddOuter(next, (1.0 - gamma) / denominator / static_cast<double>(v.size()), u);
  }
  const double largest = LargestElement(next);
  if (largest > options.clip) KeepAndShift(next, options.clip / largest, 0.0);
  j = next;
}

double Norm(const Vector& d, int64_t cols, bool bias_apart) {
  double weight = 0, bias = 0;
  for (size_t i = 0; i < d.size(); ++i) {
    const bool is_bias = bias_apart && static_cast<int64_t>(i) % cols == cols - 1;
    (is_bias ? bias : weight) += d[i] * d[i];
  }
  return std::sqrt(weight) + std::sqrt(bias);
}

}  // namespace

MkorFactor::MkorFactor(const MkorOptions& options, int64_t d) : options_(options), d_(d) {
  const int64_t count = (d + options.max_factor_dim - 1) / options.max_factor_dim;
  for (int64_t i = 0, begin = 0; i < count; ++i) {
    Block block;
    block.begin = begin;
    block.size = d / count + (i < d % count ? 1 : 0);
    block.l = Dense(block.size, block.size);
    block.j = Identity(block.size);
    begin += block.size;
    blocks_.push_back(block);
  }
}

double MkorFactor::Mass() const { return 1.0 - std::pow(options_.gamma, static_cast<double>(updates_)); }

void MkorFactor::Update(const Vectors& v) {
  ++updates_;
  for (Block& block : blocks_) {
    Vectors part;
    for (const Vector& x : v) part.emplace_back(x.begin() + block.begin, x.begin() + block.begin + block.size);
    UpdateBlock(block, part);
  }
}

void MkorFactor::UpdateBlock(Block& block, const Vectors& v) const {
  const double gamma = options_.gamma, k = static_cast<double>(v.size());
  switch (options_.rule) {
    case Rule::kExactDamped:
      KeepAndShift(block.l, gamma, 0.0);
      for (const Vector& x : v) AddOuter(block.l, (1.0 - gamma) / k, x);
      break;
    case Rule::kReference: {
      if (updates_ == 1) break;  // the package throws its first vector away
      Vectors clamped = v;
      for (Vector& x : clamped) {
        for (double& element : x) element = std::clamp(element, -options_.clip, options_.clip);
      }
      BlendAndShermanMorrison(block.j, gamma, 1.0 / std::sqrt(k), clamped);
      break;
    }
    case Rule::kBlend: {
      block.mean_square = gamma * block.mean_square + (1.0 - gamma) * MeanSquare(v);
      const double variance = options_.damping * block.mean_square / Mass() / static_cast<double>(block.size);
      BlendAndShermanMorrison(block.j, gamma, variance > 0 ? 1.0 / std::sqrt(k * variance) : 0.0, v);
      break;
    }
    case Rule::kPublished:
      Published(block.j, options_, v);
      break;
  }
}

double MkorFactor::Damping() const {
  return updates_ == 0 ? 0.0 : options_.damping * Trace(blocks_[0].l) / Mass() / static_cast<double>(blocks_[0].size);
}

Dense MkorFactor::Inverse() const {
  Dense out(d_, d_);
  for (const Block& block : blocks_) {
    Dense j = block.j;
    if (options_.rule == Rule::kExactDamped && Trace(block.l) > 0) {
      Dense damped = block.l;
      KeepAndShift(damped, 1.0 / Mass(), options_.damping * Trace(block.l) / Mass() / static_cast<double>(block.size));
      j = SpdInverse(damped);
    }
    for (int64_t i = 0; i < block.size; ++i) {
      for (int64_t k = 0; k < block.size; ++k) out.at(block.begin + i, block.begin + k) = j.at(i, k);
    }
  }
  return out;
}

Mkor::Mkor(const MkorOptions& options, int64_t d_out, int64_t d_in, bool has_bias)
    : options_(options),
      d_out_(d_out),
      d_in_(d_in),
      has_bias_(has_bias),
      input_(options, d_in),
      output_(options, d_out) {}

void Mkor::Update(const Vectors& a, const Vectors& g) {
  input_.Update(a);
  output_.Update(g);
  ready_ = true;
}

Vector Mkor::Precondition(const Vector& d) const {
  if (!ready_) return d;
  Dense gradient(d_out_, d_in_);
  gradient.data = d;
  Vector u = Product(Product(output_.Inverse(), gradient), input_.Inverse()).data;
  double scale = 1.0;
  if (options_.policy == Policy::kNormRescale) {
    const bool bias_apart = options_.rule == Rule::kReference && has_bias_;
    const double length = Norm(u, d_in_, bias_apart);
    scale = length > 0 ? Norm(d, d_in_, bias_apart) / length : 0.0;
  } else if (options_.policy == Policy::kRmsClip) {
    const double rms = Norm(u, d_in_, false) / std::sqrt(static_cast<double>(u.size()));
    scale = std::min(1.0, options_.policy_clip / rms);
  }
  for (double& element : u) element *= scale;
  return u;
}

ExactDampedOperator::ExactDampedOperator(double gamma, double damping, int64_t d, int64_t window)
    : gamma_(gamma), damping_(damping), d_(d), window_(window) {}

void ExactDampedOperator::Update(const Vectors& v) {
  ++updates_;
  steps_.push_back(v);
  if (static_cast<int64_t>(steps_.size()) > window_) steps_.pop_front();
}

double ExactDampedOperator::damping() const {
  double trace = 0, weight = 1.0 - gamma_;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step, weight *= gamma_)
    trace += weight * MeanSquare(*step);
  return damping_ * trace / (1.0 - std::pow(gamma_, static_cast<double>(updates_))) / static_cast<double>(d_);
}

Vector ExactDampedOperator::Multiply(const Vector& x) const {
  const double mass = 1.0 - std::pow(gamma_, static_cast<double>(updates_)), mu = damping();
  Vector y(d_);
  for (int64_t i = 0; i < d_; ++i) y[i] = mu * x[i];
  double weight = (1.0 - gamma_) / mass;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step, weight *= gamma_) {
    for (const Vector& v : *step) {
      const double scale = weight / static_cast<double>(step->size()) * DotProduct(v, x);
      for (int64_t i = 0; i < d_; ++i) y[i] += scale * v[i];
    }
  }
  return y;
}

Vector ExactDampedOperator::Solve(const Vector& b) const {
  Vector x(d_, 0.0), r = b, p = b;
  const double target = 1e-24 * DotProduct(b, b);
  double square = DotProduct(r, r);
  for (int64_t i = 0; i < 10 * d_ + 100 && square > target; ++i) {
    const Vector ap = Multiply(p);
    const double alpha = square / DotProduct(p, ap);
    for (int64_t j = 0; j < d_; ++j) {
      x[j] += alpha * p[j];
      r[j] -= alpha * ap[j];
    }
    const double next = DotProduct(r, r);
    for (int64_t j = 0; j < d_; ++j) p[j] = r[j] + next / square * p[j];
    square = next;
  }
  return x;
}

}  // namespace precondor::reference

// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/low_rank_factor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Eigenvalues below this share of the largest are rounding noise of an f32 Gram matrix.
constexpr double kNoiseFloor = 1e-6;
// Old columns whose share of the trace has decayed to this a step simply make room for new ones: a sliding window.
constexpr double kNegligibleShare = 1e-4;
// Below this rank a factor keeps every column it may: it cannot afford to lose half of them between recompressions.
constexpr int64_t kSmallRank = 64;

int64_t Capacity(const MkorConfig& config, int64_t d) { return std::min(config.rank, d); }

// Columns kept by a recompression when k arrive a step: as few as leave room for whole further steps in at most a
// quarter of the capacity, so that an eigendecomposition serves several steps.
int64_t RetainedRank(int64_t capacity, int64_t k) {
  return capacity < kSmallRank ? capacity : capacity - k * (capacity / 4 / k);
}

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

}  // namespace

absl::StatusOr<std::unique_ptr<Factor>> LowRankFactor::Make(const MkorConfig& config, int64_t d, Backend& backend) {
  std::unique_ptr<LowRankFactor> factor(new LowRankFactor(config, d, backend));
  const int64_t r = Capacity(config, d);
  PRECONDOR_ASSIGN_OR_RETURN(factor->vectors_, backend.Allocate(r, d));
  PRECONDOR_ASSIGN_OR_RETURN(factor->gram_, backend.Allocate(r, r));
  factor->discard_next_ = config.rule == UpdateRule::kReference;
  return std::unique_ptr<Factor>(std::move(factor));
}

int64_t LowRankFactor::StateBytes(const MkorConfig& config, int64_t d) {
  const int64_t r = Capacity(config, d);
  return (r * d + r * r) * static_cast<int64_t>(sizeof(float));
}

int64_t LowRankFactor::ScratchBytes(const MkorConfig& config, int64_t d, int64_t k) {
  const int64_t r = Capacity(config, d), n = r + k;
  const int64_t update = 2 * k * d + 2 * k * k + r * k + n * d + 3 * n * n + r * (n + d) + r * r;
  return std::max(update, 2 * r * r) * static_cast<int64_t>(sizeof(float));
}

int64_t LowRankFactor::bytes() const { return StateBytes(config_, d_); }

double LowRankFactor::Trace() const { return Sum(weights_) + tail_; }

// mu of J = (M/mass + mu I)^-1.
double LowRankFactor::Damping() const {
  return mass_ > 0 ? (config_.damping * Trace() + tail_) / static_cast<double>(d_) / mass_ : 0.0;
}

double LowRankFactor::damping() const { return config_.rule == UpdateRule::kExactDamped ? Damping() : 0.0; }

absl::Status LowRankFactor::Prepare(ConstMatrixView vectors) {
  Staged next;
  next.mass = mass_;
  next.mean_square = mean_square_;
  next.tail = config_.gamma * tail_;
  next.weights = weights_;
  for (double& weight : next.weights) weight *= config_.gamma;
  if (discard_next_) {
    next.weights = weights_;  // the package throws its first vector away, blend included
  } else {
    PRECONDOR_ASSIGN_OR_RETURN(Terms terms, MakeTerms(vectors, next));
    PRECONDOR_RETURN_IF_ERROR(Normalize(terms));
    PRECONDOR_RETURN_IF_ERROR(Append(terms, next));
  }
  staged_ = std::move(next);
  return absl::OkStatus();
}

void LowRankFactor::Commit() {
  weights_ = std::move(staged_.weights);
  tail_ = staged_.tail;
  mass_ = staged_.mass;
  mean_square_ = staged_.mean_square;
  discard_next_ = staged_.discard_next;
  if (staged_.replaces) {
    vectors_ = std::move(staged_.vectors);
    gram_ = std::move(staged_.gram);
  }
  staged_ = Staged();
}

absl::StatusOr<LowRankFactor::Terms> LowRankFactor::MakeTerms(ConstMatrixView vectors, Staged& next) const {
  const int64_t k = vectors.rows;
  if (config_.rule == UpdateRule::kExactDamped) {
    next.mass = 1.0 - config_.gamma * (1.0 - mass_);
    Terms terms;
    PRECONDOR_ASSIGN_OR_RETURN(terms.rows, backend_.Allocate(k, d_));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(vectors, terms.rows.view()));
    terms.weights.assign(k, (1.0 - config_.gamma) / static_cast<double>(k));
    return terms;
  }
  double scale = 1.0 / std::sqrt(static_cast<double>(k));
  if (config_.rule == UpdateRule::kBlend) {
    std::vector<double> squares(k);
    PRECONDOR_RETURN_IF_ERROR(backend_.RowSquaredNorms(vectors, absl::MakeSpan(squares)));
    next.mass = 1.0 - config_.gamma * (1.0 - mass_);
    next.mean_square = config_.gamma * mean_square_ + (1.0 - config_.gamma) * Sum(squares) / static_cast<double>(k);
    const double mean_square = next.mean_square / next.mass;
    scale = mean_square > 0 ? scale / std::sqrt(config_.damping * mean_square / static_cast<double>(d_)) : 0.0;
  }
  return ShermanMorrisonTerms(vectors, scale);
}

// One after the other, J <- J - J v v'J / (1 + v'J v) for k vectors subtracts U'(I + V U')^-1 U from H, with U = V H
// and V H V' = Q diag(e) Q': the rows of Q'U enter with weights 1 / (1 + e).
absl::StatusOr<LowRankFactor::Terms> LowRankFactor::ShermanMorrisonTerms(ConstMatrixView vectors, double scale) const {
  const int64_t k = vectors.rows, n = rank();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix scaled, backend_.Allocate(k, d_));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_.Allocate(k, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(scale, vectors, 0.0, scaled.view()));
  PRECONDOR_RETURN_IF_ERROR(backend_.Copy(scaled.view(), u.view()));
  if (n > 0) {
    // H = I - gamma M.
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix products, backend_.Allocate(n, k));
    const ConstMatrixView rows = vectors_.view().RowRange(0, n);
    std::vector<double> weights = weights_;
    for (double& weight : weights) weight *= config_.gamma;
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Gemm(1.0, rows, Transpose::kNo, scaled.view(), Transpose::kYes, 0.0, products.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(weights, products.view(), products.view()));
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Gemm(-1.0, products.view(), Transpose::kYes, rows, Transpose::kNo, 1.0, u.view()));
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix small, backend_.Allocate(k, k));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix q, backend_.Allocate(k, k));
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, scaled.view(), Transpose::kNo, u.view(), Transpose::kYes, 0.0, small.view()));
  PRECONDOR_RETURN_IF_ERROR(backend_.Symmetrize(small.view()));
  std::vector<double> values(k);
  PRECONDOR_RETURN_IF_ERROR(backend_.SymmetricEigen(small.view(), absl::MakeSpan(values), q.view()));
  Terms terms;
  terms.rows = std::move(scaled);
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, q.view(), Transpose::kNo, u.view(), Transpose::kNo, 0.0, terms.rows.view()));
  for (double value : values) terms.weights.push_back(1.0 / (1.0 + std::max(value, 0.0)));
  return terms;
}

// Moves each row's length into its weight; a zero row keeps weight 0.
absl::Status LowRankFactor::Normalize(Terms& terms) const {
  std::vector<double> squares(terms.weights.size());
  PRECONDOR_RETURN_IF_ERROR(backend_.RowSquaredNorms(terms.rows.view(), absl::MakeSpan(squares)));
  std::vector<double> scales(squares.size());
  for (size_t i = 0; i < squares.size(); ++i) {
    if (!std::isfinite(squares[i]))
      return absl::InvalidArgumentError("statistics: expected finite vectors, got a norm that is not");
    scales[i] = squares[i] > 0 ? 1.0 / std::sqrt(squares[i]) : 0.0;
    terms.weights[i] *= squares[i];
  }
  return backend_.ScaleRows(scales, terms.rows.view(), terms.rows.view());
}

// The blocks of [old; new][old; new]' that are not there yet.
absl::Status LowRankFactor::FillGram(ConstMatrixView old_rows, ConstMatrixView new_rows, MatrixView gram) const {
  const int64_t n = old_rows.rows, k = new_rows.rows;
  const MatrixView corner(gram.row(n) + n, k, k, gram.stride);
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, new_rows, Transpose::kNo, new_rows, Transpose::kYes, 0.0, corner));
  if (n == 0) return absl::OkStatus();
  const MatrixView below(gram.row(n), k, n, gram.stride), beside(gram.data + n, n, k, gram.stride);
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, new_rows, Transpose::kNo, old_rows, Transpose::kYes, 0.0, below));
  return backend_.Gemm(1.0, old_rows, Transpose::kNo, new_rows, Transpose::kYes, 0.0, beside);
}

absl::Status LowRankFactor::Append(const Terms& terms, Staged& next) {
  const int64_t n = rank(), k = terms.rows.rows();
  if (n + k > vectors_.rows()) {
    std::vector<double> lightest = next.weights;
    std::sort(lightest.begin(), lightest.end());
    lightest.resize(std::min(n, k));
    const bool negligible = k <= n && Sum(lightest) <= kNegligibleShare * (Sum(next.weights) + Sum(terms.weights));
    return negligible ? ReplaceLightest(terms, next) : Recompress(terms, next);
  }
  PRECONDOR_RETURN_IF_ERROR(backend_.Copy(terms.rows.view(), vectors_.view().RowRange(n, k)));
  PRECONDOR_RETURN_IF_ERROR(
      FillGram(vectors_.view().RowRange(0, n), terms.rows.view(), gram_.view().Corner(n + k, n + k)));
  next.weights.insert(next.weights.end(), terms.weights.begin(), terms.weights.end());
  return absl::OkStatus();
}

absl::Status LowRankFactor::ReplaceLightest(const Terms& terms, Staged& next) const {
  const int64_t n = rank(), k = terms.rows.rows();
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&next](int64_t i, int64_t j) { return next.weights[i] < next.weights[j]; });
  next.replaces = true;
  PRECONDOR_ASSIGN_OR_RETURN(next.vectors, backend_.Allocate(vectors_.rows(), d_));
  PRECONDOR_ASSIGN_OR_RETURN(next.gram, backend_.Allocate(gram_.rows(), gram_.cols()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix products, backend_.Allocate(n, k));
  PRECONDOR_RETURN_IF_ERROR(backend_.Copy(vectors_.view(), next.vectors.view()));
  PRECONDOR_RETURN_IF_ERROR(backend_.Copy(gram_.view(), next.gram.view()));
  for (int64_t i = 0; i < k; ++i) {
    next.tail += next.weights[order[i]];
    next.weights[order[i]] = terms.weights[i];
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Copy(terms.rows.view().RowRange(i, 1), next.vectors.view().RowRange(order[i], 1)));
  }
  const ConstMatrixView rows = next.vectors.view().RowRange(0, n);
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, rows, Transpose::kNo, terms.rows.view(), Transpose::kYes, 0.0, products.view()));
  const MatrixView gram = next.gram.view();
  for (int64_t i = 0; i < k; ++i) {
    const ConstMatrixView column(products.view().data + i, n, 1, k);
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(column, MatrixView(gram.data + order[i], n, 1, gram.stride)));
    // The row is the column again: one element a row of a [n, 1] view over it.
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(column, MatrixView(gram.row(order[i]), n, 1, 1)));
  }
  return absl::OkStatus();
}

absl::Status LowRankFactor::Recompress(const Terms& terms, Staged& next) const {
  const int64_t n = rank(), k = terms.rows.rows(), all = n + k, capacity = vectors_.rows();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix rows, backend_.Allocate(all, d_));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gram, backend_.Allocate(all, all));
  PRECONDOR_RETURN_IF_ERROR(backend_.Copy(vectors_.view().RowRange(0, n), rows.view().RowRange(0, n)));
  PRECONDOR_RETURN_IF_ERROR(backend_.Copy(terms.rows.view(), rows.view().RowRange(n, k)));
  PRECONDOR_RETURN_IF_ERROR(backend_.Copy(gram_.view().Corner(n, n), gram.view().Corner(n, n)));
  PRECONDOR_RETURN_IF_ERROR(FillGram(vectors_.view().RowRange(0, n), terms.rows.view(), gram.view()));

  std::vector<double> weights = next.weights;
  weights.insert(weights.end(), terms.weights.begin(), terms.weights.end());
  const double largest = *std::max_element(weights.begin(), weights.end());
  std::vector<double> roots(all);  // relative to the largest, so that nothing leaves f32's range
  for (int64_t i = 0; i < all; ++i) roots[i] = largest > 0 ? std::sqrt(weights[i] / largest) : 0.0;
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleBothSides(roots, gram.view(), gram.view()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix q, backend_.Allocate(all, all));
  std::vector<double> values(all);
  PRECONDOR_RETURN_IF_ERROR(backend_.SymmetricEigen(gram.view(), absl::MakeSpan(values), q.view()));

  // Ascending: the last rows of q are the ones to keep.
  const double floor = kNoiseFloor * std::max(values.back(), 0.0);
  const int64_t wanted = std::min(all, RetainedRank(capacity, k));
  int64_t kept = 0;
  while (kept < wanted && values[all - 1 - kept] > floor) ++kept;
  next.replaces = true;
  PRECONDOR_ASSIGN_OR_RETURN(next.vectors, backend_.Allocate(capacity, d_));
  PRECONDOR_ASSIGN_OR_RETURN(next.gram, backend_.Allocate(capacity, capacity));
  next.weights.assign(values.end() - kept, values.end());
  std::vector<double> inverse_roots;
  for (double& weight : next.weights) {
    inverse_roots.push_back(1.0 / std::sqrt(weight));
    weight *= largest;
  }
  for (int64_t i = 0; i < all - kept; ++i) next.tail += std::max(values[i], 0.0) * largest;
  // c_new = diag(value^-1/2) Q diag(roots) c: orthonormal up to rounding, so that the new Gram matrix is I.
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(roots, rows.view(), rows.view()));
  const MatrixView kept_q = q.view().RowRange(all - kept, kept);
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(inverse_roots, kept_q, kept_q));
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, kept_q, Transpose::kNo, rows.view(), Transpose::kNo, 0.0,
                                          next.vectors.view().RowRange(0, kept)));
  return backend_.AddDiagonal(1.0, next.gram.view().Corner(kept, kept));
}

absl::StatusOr<FactorInverse> LowRankFactor::Inverse() const {
  const int64_t n = rank();
  FactorInverse out;
  const bool damped = config_.rule == UpdateRule::kExactDamped;
  const double mu = Damping();
  if (damped && mu > 0) out.c = 1.0 / mu;
  if (n == 0 || (damped && !(mu > 0))) return out;
  PRECONDOR_ASSIGN_OR_RETURN(out.core, backend_.Allocate(n, n));
  if (damped) {
    // S = s (I + s G s)^-1 s with s = (w / (mass mu))^1/2: the matrix inverted has eigenvalues from 1 to 1 + d /
    // lambda.
    std::vector<double> s(n);
    for (int64_t i = 0; i < n; ++i) s[i] = std::sqrt(weights_[i] / (mass_ * mu));
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleBothSides(s, gram_.view().Corner(n, n), out.core.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0, out.core.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.SpdInverse(out.core.view(), out.core.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleBothSides(s, out.core.view(), out.core.view()));
  } else {
    PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0, out.core.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(weights_, out.core.view(), out.core.view()));
  }
  out.low_rank.vectors = vectors_.view().RowRange(0, n);
  out.low_rank.core = out.core.view();
  return out;
}

}  // namespace precondor

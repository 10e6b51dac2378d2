// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/dense_factor.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<std::unique_ptr<Factor>> DenseFactor::Make(const MkorConfig& config, int64_t d, Backend& backend) {
  std::unique_ptr<DenseFactor> factor(new DenseFactor(config, d, backend));
  if (config.rule == UpdateRule::kExactDamped) {
    PRECONDOR_ASSIGN_OR_RETURN(factor->covariance_, backend.Allocate(d, d));
  }
  PRECONDOR_ASSIGN_OR_RETURN(factor->inverse_, backend.Allocate(d, d));
  PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(1.0, factor->inverse_.view()));
  factor->scalars_.discard_next = config.rule == UpdateRule::kReference;
  return std::unique_ptr<Factor>(std::move(factor));
}

int64_t DenseFactor::StateBytes(const MkorConfig& config, int64_t d) {
  return (config.rule == UpdateRule::kExactDamped ? 2 : 1) * d * d * static_cast<int64_t>(sizeof(float));
}

int64_t DenseFactor::ScratchBytes(const MkorConfig& config, int64_t d, int64_t k) {
  return (2 * d * d + 3 * k * d + 2 * k * k) * static_cast<int64_t>(sizeof(float));
}

double DenseFactor::damping() const {
  // covariance_ has mean eigenvalue 1.
  return config_.rule == UpdateRule::kExactDamped && scalars_.mass > 0
             ? config_.damping * scalars_.scale / scalars_.mass
             : 0.0;
}

absl::Status DenseFactor::Prepare(ConstMatrixView vectors) {
  next_ = scalars_;
  next_.discard_next = false;
  PRECONDOR_ASSIGN_OR_RETURN(next_inverse_, backend_.Allocate(d_, d_));
  if (scalars_.discard_next) return backend_.Copy(inverse_.view(), next_inverse_.view());
  std::vector<double> squares(vectors.rows);
  PRECONDOR_RETURN_IF_ERROR(backend_.RowSquaredNorms(vectors, absl::MakeSpan(squares)));
  const double k = static_cast<double>(vectors.rows);
  const double mean_square = std::accumulate(squares.begin(), squares.end(), 0.0) / k;
  if (!std::isfinite(mean_square)) {
    return absl::InvalidArgumentError("statistics: expected finite vectors, got a norm that is not");
  }
  switch (config_.rule) {
    case UpdateRule::kExactDamped:
      return PrepareExact(vectors, mean_square);
    case UpdateRule::kReference:
      PRECONDOR_RETURN_IF_ERROR(PrepareShermanMorrison(vectors, 1.0 / std::sqrt(k)));
      break;
    case UpdateRule::kBlend: {
      next_.mass = 1.0 - config_.gamma * (1.0 - scalars_.mass);
      next_.mean_square = config_.gamma * scalars_.mean_square + (1.0 - config_.gamma) * mean_square;
      const double variance = config_.damping * next_.mean_square / next_.mass / static_cast<double>(d_);
      PRECONDOR_RETURN_IF_ERROR(PrepareShermanMorrison(vectors, variance > 0 ? 1.0 / std::sqrt(k * variance) : 0.0));
      break;
    }
    case UpdateRule::kPublished:
      PRECONDOR_RETURN_IF_ERROR(PreparePublished(vectors));
      break;
  }
  return CapAndCheck();
}

void DenseFactor::Commit() {
  scalars_ = next_;
  std::swap(inverse_, next_inverse_);
  if (!next_covariance_.empty()) std::swap(covariance_, next_covariance_);
  Abandon();
}

void DenseFactor::Abandon() {
  next_inverse_ = DeviceMatrix();
  next_covariance_ = DeviceMatrix();
}

absl::Status DenseFactor::Save(StateWriter& out) const {
  out.Text("dense");
  out.Integer(static_cast<uint64_t>(d_));
  out.Number(scalars_.scale);
  out.Number(scalars_.mass);
  out.Number(scalars_.mean_square);
  out.Integer(scalars_.discard_next ? 1 : 0);
  if (!covariance_.empty()) PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, covariance_.view()));
  return out.Matrix(backend_, inverse_.view());
}

absl::Status DenseFactor::PrepareLoad(StateReader& in) {
  PRECONDOR_RETURN_IF_ERROR(in.ExpectText("representation", "dense"));
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("dimension", static_cast<uint64_t>(d_)));
  PRECONDOR_ASSIGN_OR_RETURN(next_.scale, in.Number("scale"));
  PRECONDOR_ASSIGN_OR_RETURN(next_.mass, in.Number("mass"));
  PRECONDOR_ASSIGN_OR_RETURN(next_.mean_square, in.Number("mean square"));
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t discard_next, in.Integer("discard next"));
  next_.discard_next = discard_next != 0;
  if (!covariance_.empty()) {
    PRECONDOR_ASSIGN_OR_RETURN(next_covariance_, backend_.Allocate(d_, d_));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("covariance", backend_, next_covariance_.view()));
  }
  PRECONDOR_ASSIGN_OR_RETURN(next_inverse_, backend_.Allocate(d_, d_));
  return in.Matrix("inverse", backend_, next_inverse_.view());
}

absl::StatusOr<FactorInverse> DenseFactor::Inverse() const {
  FactorInverse out;
  out.dense = true;
  out.matrix = inverse_.view();
  if (config_.rule == UpdateRule::kExactDamped && scalars_.scale > 0) out.c = 1.0 / scalars_.scale;
  return out;
}

// L = gamma L + (1-gamma)/k sum v v', kept as scale * covariance_ with scale the mean eigenvalue, so that neither very
// small nor very large statistics leave f32's range.
absl::Status DenseFactor::PrepareExact(ConstMatrixView vectors, double mean_square) {
  const double gamma = config_.gamma, d = static_cast<double>(d_);
  next_.mass = 1.0 - gamma * (1.0 - scalars_.mass);
  next_.scale = gamma * scalars_.scale + (1.0 - gamma) * mean_square / d;
  PRECONDOR_ASSIGN_OR_RETURN(next_covariance_, backend_.Allocate(d_, d_));
  if (!(next_.scale > 0)) return backend_.Copy(inverse_.view(), next_inverse_.view());
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix scaled, backend_.Allocate(vectors.rows, d_));
  const double factor = (1.0 - gamma) / static_cast<double>(vectors.rows) / next_.scale;
  const std::vector<double> scales(vectors.rows, std::sqrt(factor));
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(scales, vectors, scaled.view()));
  const MatrixView l = next_covariance_.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(gamma * scalars_.scale / next_.scale, covariance_.view(), 0.0, l));
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, scaled.view(), Transpose::kYes, scaled.view(), Transpose::kNo, 1.0, l));
  PRECONDOR_RETURN_IF_ERROR(backend_.Symmetrize(l));
  // (L/mass + lambda tr(L)/(mass d) I)^-1 times the scale.
  const MatrixView j = next_inverse_.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1.0 / next_.mass, l, 0.0, j));
  PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(config_.damping / next_.mass, j));
  return backend_.SpdInverse(j, j);
}

// J = H - sum of rank-1 terms as in LowRankFactor::ShermanMorrisonTerms, H = gamma J + (1-gamma) I.
absl::Status DenseFactor::PrepareShermanMorrison(ConstMatrixView vectors, double scale) {
  const int64_t block = config_.ShermanMorrisonBlock(vectors.rows);
  const MatrixView j = next_inverse_.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(config_.gamma, inverse_.view(), 0.0, j));
  PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0 - config_.gamma, j));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix v, backend_.Allocate(block, d_));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_.Allocate(block, d_));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix small, backend_.Allocate(block, block));
  const MatrixView vv = v.view(), uv = u.view(), sv = small.view();
  for (int64_t begin = 0; begin < vectors.rows; begin += block) {
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(scale, vectors.RowRange(begin, block), 0.0, vv));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, vv, Transpose::kNo, j, Transpose::kNo, 0.0, uv));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, vv, Transpose::kNo, uv, Transpose::kYes, 0.0, sv));
    PRECONDOR_RETURN_IF_ERROR(backend_.Symmetrize(sv));
    PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0, sv));
    PRECONDOR_RETURN_IF_ERROR(backend_.SpdInverse(sv, sv));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, sv, Transpose::kNo, uv, Transpose::kNo, 0.0, vv));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(-1.0, uv, Transpose::kYes, vv, Transpose::kNo, 1.0, j));
    PRECONDOR_RETURN_IF_ERROR(backend_.Symmetrize(j));
  }
  return absl::OkStatus();
}

// Algorithm 1 of the paper, lines 5-10; several vectors of a step enter with the mean of their terms.
absl::Status DenseFactor::PreparePublished(ConstMatrixView vectors) {
  const int64_t k = vectors.rows;
  const double gamma = config_.gamma;
  std::vector<double> diagonal(d_);
  PRECONDOR_RETURN_IF_ERROR(backend_.Diagonal(inverse_.view(), absl::MakeSpan(diagonal)));
  const double largest = *std::max_element(diagonal.begin(), diagonal.end());
  const double keep = largest > config_.norm_threshold ? config_.zeta : 1.0;
  const MatrixView j = next_inverse_.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(keep, inverse_.view(), 0.0, j));
  PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0 - keep, j));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_.Allocate(k, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, vectors, Transpose::kNo, j, Transpose::kNo, 0.0, u.view()));
  std::vector<double> roots(k);
  for (int64_t i = 0; i < k; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const double x, backend_.Dot(vectors.RowRange(i, 1), u.view().RowRange(i, 1)));
    roots[i] = std::sqrt(PublishedWeight(gamma, x) / static_cast<double>(k));
  }
  PRECONDOR_RETURN_IF_ERROR(backend_.ScaleRows(roots, u.view(), u.view()));
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, u.view(), Transpose::kYes, u.view(), Transpose::kNo, gamma, j));
  return backend_.Symmetrize(j);
}

// For SPD J the largest element is on the diagonal, so that capping the diagonal caps them all. Scaling keeps J SPD,
// which clamping elements would not. Only PUBLISHED grows beyond I.
absl::Status DenseFactor::CapAndCheck() {
  std::vector<double> diagonal(d_);
  PRECONDOR_RETURN_IF_ERROR(backend_.Diagonal(next_inverse_.view(), absl::MakeSpan(diagonal)));
  double largest = 0;
  for (double value : diagonal) {
    if (!std::isfinite(value) || value < 0) {
      return absl::FailedPreconditionError("factor: expected a finite positive diagonal after the update");
    }
    largest = std::max(largest, value);
  }
  if (config_.rule != UpdateRule::kPublished || largest <= config_.clip) return absl::OkStatus();
  return backend_.Axpby(config_.clip / largest, next_inverse_.view(), 0.0, next_inverse_.view());
}

}  // namespace precondor

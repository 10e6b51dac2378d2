// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/dense_factor.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"

namespace precondor {

absl::StatusOr<std::unique_ptr<Factor>> DenseFactor::Make(const MkorConfig& config, int64_t d, Backend& backend) {
  std::unique_ptr<DenseFactor> factor(new DenseFactor(config, d, backend));
  PRECONDOR_ASSIGN_OR_RETURN(factor->covariance_, backend.Allocate(d, d));
  PRECONDOR_ASSIGN_OR_RETURN(factor->inverse_, backend.Allocate(d, d));
  PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(1.0, factor->inverse_.view()));
  return std::unique_ptr<Factor>(std::move(factor));
}

int64_t DenseFactor::StateBytes(int64_t d) { return 2 * d * d * static_cast<int64_t>(sizeof(float)); }

int64_t DenseFactor::ScratchBytes(int64_t d, int64_t k) {
  return (2 * d * d + k * d) * static_cast<int64_t>(sizeof(float)) + SpdInverseScratchBytes(d);
}

double DenseFactor::damping() const {
  // covariance_ has mean eigenvalue 1.
  return scalars_.mass > 0 ? config_.damping * scalars_.scale / scalars_.mass : 0.0;
}

// L = gamma L + (1-gamma)/k sum v v', kept as scale * covariance_ with scale the mean eigenvalue, so that neither very
// small nor very large statistics leave f32's range.
absl::Status DenseFactor::Prepare(ConstMatrixView vectors, absl::Span<const double>) {
  next_ = scalars_;
  PerVector squares(vectors.rows);
  PRECONDOR_RETURN_IF_ERROR(backend_.RowSquaredNorms(vectors, absl::MakeSpan(squares)));
  const double mean_square = std::accumulate(squares.begin(), squares.end(), 0.0) / static_cast<double>(vectors.rows);
  if (!std::isfinite(mean_square)) {
    return absl::InvalidArgumentError("statistics: expected finite vectors, got a norm that is not");
  }
  const double gamma = config_.gamma, d = static_cast<double>(d_);
  next_.mass = 1.0 - gamma * (1.0 - scalars_.mass);
  next_.scale = gamma * scalars_.scale + (1.0 - gamma) * mean_square / d;
  PRECONDOR_ASSIGN_OR_RETURN(next_covariance_, backend_.Allocate(d_, d_));
  PRECONDOR_ASSIGN_OR_RETURN(next_inverse_, backend_.Allocate(d_, d_));
  if (!(next_.scale > 0)) return backend_.Copy(inverse_.view(), next_inverse_.view());
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix scaled, backend_.Allocate(vectors.rows, d_));
  const double factor = (1.0 - gamma) / static_cast<double>(vectors.rows) / next_.scale;
  const PerVector scales(vectors.rows, std::sqrt(factor));
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

void DenseFactor::Commit() {
  scalars_ = next_;
  std::swap(inverse_, next_inverse_);
  std::swap(covariance_, next_covariance_);
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
  out.Number(0);   // unused: a field of other rules in earlier versions
  out.Integer(0);  // unused, likewise
  PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, covariance_.view()));
  return out.Matrix(backend_, inverse_.view());
}

absl::Status DenseFactor::PrepareLoad(StateReader& in) {
  PRECONDOR_RETURN_IF_ERROR(in.ExpectText("representation", "dense"));
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("dimension", static_cast<uint64_t>(d_)));
  PRECONDOR_ASSIGN_OR_RETURN(next_.scale, in.Number("scale"));
  PRECONDOR_ASSIGN_OR_RETURN(next_.mass, in.Number("mass"));
  PRECONDOR_RETURN_IF_ERROR(in.Number("mean square").status());
  PRECONDOR_RETURN_IF_ERROR(in.Integer("discard next").status());
  PRECONDOR_ASSIGN_OR_RETURN(next_covariance_, backend_.Allocate(d_, d_));
  PRECONDOR_RETURN_IF_ERROR(in.Matrix("covariance", backend_, next_covariance_.view()));
  PRECONDOR_ASSIGN_OR_RETURN(next_inverse_, backend_.Allocate(d_, d_));
  return in.Matrix("inverse", backend_, next_inverse_.view());
}

absl::StatusOr<FactorInverse> DenseFactor::Inverse() const {
  FactorInverse out;
  out.dense = true;
  out.form = inverse_.view();
  if (scalars_.scale > 0) out.c = 1.0 / scalars_.scale;
  return out;
}

}  // namespace precondor

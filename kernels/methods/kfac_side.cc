// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kfac_side.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<KfacSide> KfacSide::Make(KfacForm form, int64_t d, Backend& backend) {
  KfacSide side(form, d, backend);
  PRECONDOR_RETURN_IF_ERROR(side.PrepareReset());
  PRECONDOR_ASSIGN_OR_RETURN(side.next_basis_, backend.Allocate(d, d));
  side.Commit();
  return side;
}

int64_t KfacSide::StateBytes(int64_t d) { return (d * (d + 1) / 2 + d * d) * static_cast<int64_t>(sizeof(float)); }

int64_t KfacSide::ScratchBytes(int64_t d) { return StateBytes(d) + (d * d + d) * static_cast<int64_t>(sizeof(float)); }

absl::Status KfacSide::PrepareFactor(ConstMatrixView vectors, ConstMatrixView covariance, double keep, double add) {
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, packed()));
  const MatrixView next = next_factor_.view();
  if (vectors.rows > 0) {
    // Only the lower triangle is kept, so F is symmetric to the bit.
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend_->Allocate(d_, d_));
    PRECONDOR_RETURN_IF_ERROR(backend_->UnpackLower(factor_.view(), work.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_->Gemm(add / static_cast<double>(vectors.rows), vectors, Transpose::kYes, vectors,
                                             Transpose::kNo, keep, work.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_->PackLower(work.view(), next));
  } else {
    PRECONDOR_RETURN_IF_ERROR(backend_->Copy(factor_.view(), next));
    PRECONDOR_RETURN_IF_ERROR(backend_->Axpby(add, covariance, keep, next));
  }
  double square = 0;
  PRECONDOR_RETURN_IF_ERROR(backend_->RowSquaredNorms(next, absl::MakeSpan(&square, 1)));
  if (std::isfinite(square)) return absl::OkStatus();
  return absl::InvalidArgumentError("expected a second moment within f32, got NaN or infinity");
}

absl::Status KfacSide::PrepareReset() {
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, packed()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend_->Allocate(d_, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_->AddDiagonal(1.0, work.view()));
  return backend_->PackLower(work.view(), next_factor_.view());
}

absl::StatusOr<double> KfacSide::MeanDiagonal() {
  std::vector<int64_t> at(d_);
  for (int64_t i = 0; i < d_; ++i) at[i] = i * (i + 3) / 2;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix diagonal, backend_->Allocate(1, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_->Gather({}, at, CurrentFactor(), diagonal.view()));
  std::vector<float> host(d_);
  PRECONDOR_RETURN_IF_ERROR(backend_->Download(diagonal.view(), MatrixView(host.data(), 1, d_)));
  return std::accumulate(host.begin(), host.end(), 0.0) / static_cast<double>(d_);
}

absl::Status KfacSide::PrepareDecomposition(double damping) {
  PRECONDOR_ASSIGN_OR_RETURN(next_basis_, backend_->Allocate(d_, d_));
  next_numbers_ = Numbers();
  return form_ == KfacForm::kEigen ? PrepareEigen() : PrepareInverse(damping);
}

absl::Status KfacSide::PrepareEigen() {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend_->Allocate(d_, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_->UnpackLower(CurrentFactor(), work.view()));
  std::vector<double>& values = next_numbers_.values;
  values.resize(d_);
  PRECONDOR_RETURN_IF_ERROR(backend_->SymmetricEigen(work.view(), absl::MakeSpan(values), next_basis_.view()));
  for (double& value : values) value = std::max(value, 0.0);
  return absl::OkStatus();
}

// Of F + damping I in units of its mean eigenvalue, so that the inverse fits f32 whatever the statistics' units.
absl::Status KfacSide::PrepareInverse(double damping) {
  PRECONDOR_ASSIGN_OR_RETURN(const double mean, MeanDiagonal());
  const double scale = std::max(mean, 0.0) + damping;
  const MatrixView j = next_basis_.view();
  next_numbers_.scale = scale;
  PRECONDOR_RETURN_IF_ERROR(backend_->UnpackLower(CurrentFactor(), j));
  PRECONDOR_RETURN_IF_ERROR(backend_->Axpby(1.0 / scale, j, 0.0, j));
  PRECONDOR_RETURN_IF_ERROR(backend_->AddDiagonal(damping / scale, j));
  absl::Status status = backend_->SpdInverse(j, j);
  return absl::IsFailedPrecondition(status) ? InvertByEigenvalues(damping / scale) : status;
}

// next_basis_ holds the damped matrix; eigenvalues of F below 0 are those of it below `floor`.
absl::Status KfacSide::InvertByEigenvalues(double floor) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix q, backend_->Allocate(d_, d_));
  std::vector<double> values(d_);
  PRECONDOR_RETURN_IF_ERROR(backend_->SymmetricEigen(next_basis_.view(), absl::MakeSpan(values), q.view()));
  for (double& value : values) value = 1.0 / std::sqrt(std::max(value, floor));
  PRECONDOR_RETURN_IF_ERROR(backend_->ScaleRows(values, q.view(), q.view()));
  PRECONDOR_RETURN_IF_ERROR(
      backend_->Gemm(1.0, q.view(), Transpose::kYes, q.view(), Transpose::kNo, 0.0, next_basis_.view()));
  return backend_->Symmetrize(next_basis_.view());
}

void KfacSide::Commit() {
  if (!next_factor_.empty()) factor_ = std::move(next_factor_);
  if (!next_basis_.empty()) {
    basis_ = std::move(next_basis_);
    numbers_ = std::move(next_numbers_);
  }
  Abandon();
}

void KfacSide::Abandon() {
  next_factor_ = DeviceMatrix();
  AbandonDecomposition();
}

void KfacSide::AbandonDecomposition() {
  next_basis_ = DeviceMatrix();
  next_numbers_ = Numbers();
}

absl::Status KfacSide::Save(StateWriter& out) const {
  out.Integer(static_cast<uint64_t>(d_));
  out.Number(numbers_.scale);
  out.Numbers(numbers_.values);
  PRECONDOR_RETURN_IF_ERROR(out.Matrix(*backend_, factor_.view()));
  return out.Matrix(*backend_, basis_.view());
}

absl::Status KfacSide::PrepareLoad(StateReader& in) {
  PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("dimension", static_cast<uint64_t>(d_)));
  PRECONDOR_ASSIGN_OR_RETURN(next_numbers_.scale, in.Number("scale"));
  PRECONDOR_ASSIGN_OR_RETURN(next_numbers_.values, in.Numbers("eigenvalues"));
  const size_t count = next_numbers_.values.size();
  if (count != 0 && count != static_cast<size_t>(d_)) {
    return absl::DataLossError(absl::StrCat("eigenvalues: expected 0 or ", d_, ", got ", count));
  }
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, packed()));
  PRECONDOR_ASSIGN_OR_RETURN(next_basis_, backend_->Allocate(d_, d_));
  PRECONDOR_RETURN_IF_ERROR(in.Matrix("factor", *backend_, next_factor_.view()));
  return in.Matrix("basis", *backend_, next_basis_.view());
}

int64_t KfacSide::bytes() const {
  return (factor_.view().size() + basis_.view().size()) * static_cast<int64_t>(sizeof(float));
}

}  // namespace precondor

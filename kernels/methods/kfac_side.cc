// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kfac_side.h"

#include <cmath>
#include <utility>

#include "absl/types/span.h"

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<KfacSide> KfacSide::Make(int64_t d, Backend& backend) {
  KfacSide side(d, backend);
  PRECONDOR_RETURN_IF_ERROR(side.PrepareReset());
  side.Commit();
  return side;
}

absl::Status KfacSide::PrepareFactor(ConstMatrixView vectors, ConstMatrixView covariance, double keep, double add) {
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, PackedElements(d_)));
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
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, PackedElements(d_)));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend_->Allocate(d_, d_));
  PRECONDOR_RETURN_IF_ERROR(backend_->AddDiagonal(1.0, work.view()));
  return backend_->PackLower(work.view(), next_factor_.view());
}

void KfacSide::Commit() {
  if (!next_factor_.empty()) factor_ = std::exchange(next_factor_, DeviceMatrix());
}

absl::Status KfacSide::PrepareLoad(StateReader& in) {
  PRECONDOR_ASSIGN_OR_RETURN(next_factor_, backend_->Allocate(1, PackedElements(d_)));
  return in.Matrix("factor", *backend_, next_factor_.view());
}

}  // namespace precondor

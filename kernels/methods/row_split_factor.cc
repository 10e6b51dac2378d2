// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/row_split_factor.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

int64_t BlockOf(int64_t d, int size) { return (d + size - 1) / size; }

}  // namespace

absl::StatusOr<std::unique_ptr<RowSplitFactor>> RowSplitFactor::Make(int64_t d, absl::Duration timeout,
                                                                     Backend& backend, Collective& ranks) {
  if (d < 1) return absl::InvalidArgumentError(absl::StrCat("row-split factor: expected d >= 1, got ", d));
  if (ranks.backend_name() != backend.name()) {
    return absl::InvalidArgumentError(absl::StrCat("row-split factor: expected a collective for backend ",
                                                   backend.name(), ", got ", ranks.name(), ", which is for ",
                                                   ranks.backend_name()));
  }
  if (backend.name() == "cuda") {
    return absl::UnimplementedError(
        "row-split factor: expected a backend whose work is done when its calls return, got cuda: its collective does "
        "not "
        "follow its stream yet");
  }
  std::unique_ptr<RowSplitFactor> factor(new RowSplitFactor(d, timeout, backend, ranks));
  const int64_t count = std::min(factor->block_, d - factor->begin_);
  PRECONDOR_ASSIGN_OR_RETURN(factor->rows_, backend.Allocate(count, d));
  PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(1.0, factor->OwnColumns(factor->rows_.view())));
  return factor;
}

RowSplitFactor::RowSplitFactor(int64_t d, absl::Duration timeout, Backend& backend, Collective& ranks)
    : d_(d),
      timeout_(timeout),
      backend_(backend),
      ranks_(ranks),
      block_(BlockOf(d, ranks.size())),
      begin_(std::min(d, block_ * ranks.rank())) {}

int64_t RowSplitFactor::StateBytes(int64_t d, int size) {
  return BlockOf(d, size) * d * static_cast<int64_t>(sizeof(float));
}

absl::Status RowSplitFactor::CheckShape(const char* what, ConstMatrixView x, int64_t rows, int64_t cols) const {
  if (x.rows == rows && x.cols == cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("row-split factor of ", d_, ": ", what, ": expected [", rows, ", ",
                                                 cols, "], got [", x.rows, ", ", x.cols, "]"));
}

absl::StatusOr<DeviceMatrix> RowSplitFactor::Product(ConstMatrixView v) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix product, backend_.Allocate(v.rows, padded()));
  const MatrixView y = product.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, v, Transpose::kNo, rows_.view(), Transpose::kYes, 0.0, OwnColumns(y)));
  std::vector<CollectiveCall> gather(v.rows);
  for (int64_t i = 0; i < v.rows; ++i) {
    const float* mine = y.row(i) + block_ * ranks_.rank();
    gather[i] = {CollectiveKind::kAllGather, DType::kF32, mine, y.row(i), block_};
  }
  PRECONDOR_RETURN_IF_ERROR(ranks_.Run(gather, timeout_));
  return product;
}

absl::Status RowSplitFactor::Multiply(ConstMatrixView v, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckShape("v", v, v.rows, d_));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("y", y, v.rows, d_));
  if (v.rows == 0) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix product, Product(v));
  return backend_.Copy(product.view().Corner(v.rows, d_), y);
}

absl::Status RowSplitFactor::Update(double decay, double shift, double weight, ConstMatrixView v) {
  PRECONDOR_RETURN_IF_ERROR(CheckShape("vectors", v, v.rows, d_));
  const MatrixView rows = rows_.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(weight, OwnColumns(v), Transpose::kYes, v, Transpose::kNo, decay, rows));
  return backend_.AddDiagonal(shift, OwnColumns(rows));
}

// H - U'(I + V U')^-1 U for U = V H.
absl::Status RowSplitFactor::ShermanMorrison(double decay, double shift, ConstMatrixView v) {
  PRECONDOR_RETURN_IF_ERROR(CheckShape("vectors", v, v.rows, d_));
  const int64_t k = v.rows;
  if (k == 0) return Update(decay, shift, 0.0, v);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix product, Product(v));
  const MatrixView u = product.view().Corner(k, d_);
  PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(shift, v, decay, u));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix small, backend_.Allocate(k, k));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix solved, backend_.Allocate(k, d_));
  const MatrixView s = small.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, v, Transpose::kNo, u, Transpose::kYes, 0.0, s));
  PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0, s));
  PRECONDOR_RETURN_IF_ERROR(backend_.Symmetrize(s));
  PRECONDOR_RETURN_IF_ERROR(backend_.SpdInverse(s, s));
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, s, Transpose::kNo, u, Transpose::kNo, 0.0, solved.view()));
  const MatrixView rows = rows_.view();
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(-1.0, OwnColumns(u), Transpose::kYes, solved.view(), Transpose::kNo, decay, rows));
  return backend_.AddDiagonal(shift, OwnColumns(rows));
}

absl::Status RowSplitFactor::Precondition(ConstMatrixView g, ConstMatrixView r, MatrixView u) {
  const int64_t n = g.cols;
  PRECONDOR_RETURN_IF_ERROR(CheckShape("gradient", g, d_, n));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("right factor", r, n, n));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("result", u, d_, n));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix half, backend_.Allocate(count(), n));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gathered, backend_.Allocate(padded(), n));
  const MatrixView mine = gathered.view().RowRange(block_ * ranks_.rank(), block_);
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, rows_.view(), Transpose::kNo, g, Transpose::kNo, 0.0, half.view()));
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, half.view(), Transpose::kNo, r, Transpose::kNo, 0.0, mine.RowRange(0, count())));
  PRECONDOR_RETURN_IF_ERROR(ranks_.AllGather(DType::kF32, mine.data, gathered.view().data, block_ * n, timeout_));
  return backend_.Copy(gathered.view().RowRange(0, d_), u);
}

absl::Status RowSplitFactor::PreconditionRows(ConstMatrixView g, ConstMatrixView r, MatrixView u) {
  const int64_t n = g.cols;
  PRECONDOR_RETURN_IF_ERROR(CheckShape("rows of the gradient", g, count(), n));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("right factor", r, n, n));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("rows of the result", u, count(), n));
  // M is symmetric, so that this rank's rows are its columns: what its rows of g give to all rows of M g.
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix part, backend_.Allocate(padded(), n));
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, rows_.view(), Transpose::kYes, g, Transpose::kNo, 0.0, part.view().RowRange(0, d_)));
  const MatrixView mine = part.view().RowRange(block_ * ranks_.rank(), block_);
  PRECONDOR_RETURN_IF_ERROR(ranks_.ReduceScatter(DType::kF32, part.view().data, mine.data, block_ * n, timeout_));
  return backend_.Gemm(1.0, mine.RowRange(0, count()), Transpose::kNo, r, Transpose::kNo, 0.0, u);
}

}  // namespace precondor

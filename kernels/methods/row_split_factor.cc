// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/row_split_factor.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

int64_t BlockOf(int64_t d, int size) { return (d + size - 1) / size; }

}  // namespace

absl::StatusOr<std::unique_ptr<RowSplitFactor>> RowSplitFactor::Make(int64_t d, int rank, int size, Backend& backend) {
  PRECONDOR_CHECK(rank >= 0 && rank < size);
  if (d < 1) return absl::InvalidArgumentError(absl::StrCat("row-split factor: expected d >= 1, got ", d));
  std::unique_ptr<RowSplitFactor> factor(new RowSplitFactor(d, rank, size, backend));
  const int64_t count = std::min(factor->block_, d - factor->begin_);
  PRECONDOR_ASSIGN_OR_RETURN(factor->rows_, backend.Allocate(count, d));
  PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(1.0, factor->OwnColumns(factor->rows_.view())));
  return factor;
}

RowSplitFactor::RowSplitFactor(int64_t d, int rank, int size, Backend& backend)
    : d_(d),
      rank_(rank),
      size_(size),
      backend_(backend),
      block_(BlockOf(d, size)),
      begin_(std::min(d, block_ * rank)) {}

int64_t RowSplitFactor::StateBytes(int64_t d, int size) {
  return BlockOf(d, size) * d * static_cast<int64_t>(sizeof(float));
}

absl::Status RowSplitFactor::CheckShape(const char* what, ConstMatrixView x, int64_t rows, int64_t cols) const {
  if (x.rows == rows && x.cols == cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("row-split factor of ", d_, ": ", what, ": expected [", rows, ", ",
                                                 cols, "], got [", x.rows, ", ", x.cols, "]"));
}

absl::Status RowSplitFactor::CheckRank(const Rank& rank) const {
  PRECONDOR_CHECK(rank.rank == rank_ && rank.ranks.size() == size_ && &rank.backend == &backend_);
  if (rank.ranks.backend_name() == backend_.name()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("row-split factor: expected a collective for backend ",
                                                 backend_.name(), ", got ", rank.ranks.name(), ", which is for ",
                                                 rank.ranks.backend_name()));
}

absl::StatusOr<DeviceMatrix> RowSplitFactor::Product(const Rank& rank, ConstMatrixView v) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix product, backend_.AllocateScratch(v.rows, padded()));
  const MatrixView y = product.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, v, Transpose::kNo, rows_.view(), Transpose::kYes, 0.0, OwnColumns(y)));
  std::vector<CollectiveCall> gather(v.rows);
  for (int64_t i = 0; i < v.rows; ++i) {
    gather[i] = {CollectiveKind::kAllGather, DType::kF32, y.row(i) + block_ * rank_, y.row(i), block_};
  }
  PRECONDOR_RETURN_IF_ERROR(backend_.Flush());
  PRECONDOR_RETURN_IF_ERROR(rank.ranks.Run(gather, rank.timeout));
  return product;
}

absl::StatusOr<DeviceMatrix> RowSplitFactor::Terms(const Rank& rank, double decay, double shift, ConstMatrixView v,
                                                   int64_t block) {
  PRECONDOR_RETURN_IF_ERROR(CheckRank(rank));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("vectors", v, v.rows, d_));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix terms, backend_.AllocateScratch(v.rows, d_));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix product, Product(rank, v));
  const MatrixView all = product.view().Corner(v.rows, d_);
  const std::vector<double> weights(v.rows, -1.0);
  for (int64_t begin = 0; begin < v.rows; begin += block) {
    const int64_t count = std::min(block, v.rows - begin);
    // H minus the terms before this block.
    const SymmetricForm h(decay, shift, absl::MakeConstSpan(weights).first(begin), terms.view().RowRange(0, begin));
    PRECONDOR_RETURN_IF_ERROR(backend_.ShermanMorrisonTerms(
        h, 1.0, v.RowRange(begin, count), all.RowRange(begin, count), terms.view().RowRange(begin, count), {}));
  }
  return terms;
}

absl::Status RowSplitFactor::Apply(double decay, double shift, ConstMatrixView left, ConstMatrixView right) {
  PRECONDOR_RETURN_IF_ERROR(CheckShape("left terms", left, left.rows, d_));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("right terms", right, left.rows, d_));
  const MatrixView rows = rows_.view();
  PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(-1.0, OwnColumns(left), Transpose::kYes, right, Transpose::kNo, decay, rows));
  return backend_.AddDiagonal(shift, OwnColumns(rows));
}

absl::Status RowSplitFactor::Upload(int64_t first, ConstMatrixView host) {
  return backend_.Upload(host, rows_.view().RowRange(first, host.rows));
}

absl::StatusOr<DeviceMatrix> RowSplitFactor::Left(const Rank& rank, ConstMatrixView g) {
  PRECONDOR_RETURN_IF_ERROR(CheckRank(rank));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("gradient", g, d_, g.cols));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gathered, backend_.AllocateScratch(padded(), g.cols));
  const MatrixView mine = gathered.view().RowRange(block_ * rank_, block_);
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, rows_.view(), Transpose::kNo, g, Transpose::kNo, 0.0, mine.RowRange(0, count())));
  PRECONDOR_RETURN_IF_ERROR(backend_.Flush());
  PRECONDOR_RETURN_IF_ERROR(
      rank.ranks.AllGather(DType::kF32, mine.data, gathered.view().data, mine.size(), rank.timeout));
  return gathered;
}

absl::Status RowSplitFactor::Right(const Rank& rank, ConstMatrixView g, MatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(CheckRank(rank));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("gradient", g, g.rows, d_));
  if (u.size() > 0) PRECONDOR_RETURN_IF_ERROR(CheckShape("result", u, g.rows, d_));
  // The columns of each rank in turn, [m, block].
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gathered, backend_.AllocateScratch(size_ * g.rows, block_));
  const MatrixView all = gathered.view(), mine = all.RowRange(rank_ * g.rows, g.rows);
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Gemm(1.0, g, Transpose::kNo, rows_.view(), Transpose::kYes, 0.0, mine.Corner(g.rows, count())));
  PRECONDOR_RETURN_IF_ERROR(backend_.Flush());
  PRECONDOR_RETURN_IF_ERROR(rank.ranks.AllGather(DType::kF32, mine.data, all.data, mine.size(), rank.timeout));
  for (int64_t begin = 0; u.size() > 0 && begin < d_; begin += block_) {
    const int64_t columns = std::min(block_, d_ - begin);
    const MatrixView part(u.data + begin, u.rows, columns, u.stride);
    const ConstMatrixView from = all.RowRange(begin / block_ * g.rows, g.rows);
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(from.Corner(g.rows, columns), part));
  }
  return absl::OkStatus();
}

}  // namespace precondor

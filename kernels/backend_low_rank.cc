// SPDX-License-Identifier: Apache-2.0
// Backend's composites of the low-rank form, made from its primitives.
#include <cstdint>

#include "kernels/backend.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

MatrixView Columns(MatrixView x, int64_t begin, int64_t count) {
  return MatrixView(x.data + begin, x.rows, count, x.stride);
}

LowRankInverse WithShapes(const LowRankInverse& j, int64_t d) {
  if (j.vectors.rows > 0) return j;
  return {j.c, ConstMatrixView(nullptr, 0, d), ConstMatrixView(nullptr, 0, 0), {}};
}

// With X = P D, Y = D Q' and K = P Y,
//   J_out D J_in / (c_out c_in) = (I - P'SP) D (I - Q'TQ) = D - [P'S, Y] [X - K T Q; T Q]
//                                                         = D - [P'S, (Y - P'S K) T] [X; Q],
// so that two products make X and Y and one product of inner size p + q makes u. The form whose small products have the
// shorter side of D is used. Each product has the orientation in which BLAS is fastest: Q D' instead of D Q', for
// example, takes up to twice as long.
absl::Status ProductOfLowRank(Backend& backend, const LowRankInverse& out_side, const LowRankInverse& in_side,
                              ConstMatrixView d, MatrixView u) {
  const double scale = out_side.c * in_side.c;
  // Gives a side without vectors views of the right shape.
  const LowRankInverse out = WithShapes(out_side, d.rows), in = WithShapes(in_side, d.cols);
  const int64_t p = out.vectors.rows, q = in.vectors.rows;
  PRECONDOR_RETURN_IF_ERROR(scale == 1.0 ? backend.Copy(d, u) : backend.Axpby(scale, d, 0.0, u));
  if (p + q == 0) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix left, backend.AllocateScratch(d.rows, p + q));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix right, backend.AllocateScratch(p + q, d.cols));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix k, backend.AllocateScratch(p, q));
  const MatrixView ps = Columns(left.view(), 0, p), y = Columns(left.view(), p, q);
  const MatrixView x = right.view().RowRange(0, p), rest = right.view().RowRange(p, q);
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, out.vectors, Transpose::kNo, d, Transpose::kNo, 0.0, x));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, out.vectors, Transpose::kYes, out.core, Transpose::kNo, 0.0, ps));
  if (d.rows < d.cols) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix raw_y, backend.AllocateScratch(d.rows, q));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, d, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, raw_y.view()));
    PRECONDOR_RETURN_IF_ERROR(
        backend.Gemm(1.0, out.vectors, Transpose::kNo, raw_y.view(), Transpose::kNo, 0.0, k.view()));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(-1.0, ps, Transpose::kNo, k.view(), Transpose::kNo, 1.0, raw_y.view()));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, raw_y.view(), Transpose::kNo, in.core, Transpose::kNo, 0.0, y));
    PRECONDOR_RETURN_IF_ERROR(backend.Copy(in.vectors, rest));
  } else {
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, d, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, y));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, in.core, Transpose::kNo, in.vectors, Transpose::kNo, 0.0, rest));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, x, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, k.view()));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(-1.0, k.view(), Transpose::kNo, rest, Transpose::kNo, 1.0, x));
  }
  return backend.Gemm(-scale, left.view(), Transpose::kNo, right.view(), Transpose::kNo, 1.0, u);
}

}  // namespace

absl::Status Backend::RunByPrimitives(const operation::LowRankPrecondition& product) {
  PRECONDOR_RETURN_IF_ERROR(ProductOfLowRank(*this, product.out_side, product.in_side, product.d, product.u));
  if (product.squares.empty()) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(product.squares[0], Dot(product.d, product.d));
  PRECONDOR_ASSIGN_OR_RETURN(product.squares[1], Dot(product.u, product.u));
  return absl::OkStatus();
}

absl::Status Backend::RunByPrimitives(const operation::LowRankCore& make) {
  const MatrixView core = make.core;
  PRECONDOR_RETURN_IF_ERROR(UnpackLower(make.gram, core));
  PRECONDOR_RETURN_IF_ERROR(ScaleBothSides(make.roots, core, core));
  PRECONDOR_RETURN_IF_ERROR(AddDiagonal(1.0, core));
  PRECONDOR_RETURN_IF_ERROR(SpdInverse(core, core));
  PRECONDOR_RETURN_IF_ERROR(ScaleBothSides(make.roots, core, core));
  return make.packed.size() == 0 ? absl::OkStatus() : PackLower(core, make.packed);
}

absl::Status Backend::RunByPrimitives(const operation::LowRankAppend& append) {
  const int64_t k = append.rows.rows;
  const absl::Span<const int64_t> slots = append.slots;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix products, AllocateScratch(k, append.vectors.rows));
  // Consecutive slots are handled together: a product can only read rows that are contiguous.
  const bool together = slots.back() - slots.front() + 1 == k;
  for (int64_t i = 0; i < k; i += together ? k : 1) {
    const int64_t count = together ? k : 1;
    const MatrixView placed = append.vectors.RowRange(slots[i], count), of_placed = products.view().RowRange(i, count);
    PRECONDOR_RETURN_IF_ERROR(ScaleRows(append.scales.subspan(i, count), append.rows.RowRange(i, count), placed));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, placed, Transpose::kNo, append.vectors, Transpose::kYes, 0.0, of_placed));
  }
  for (int64_t i = 0; i < k; ++i) {
    PRECONDOR_RETURN_IF_ERROR(PackRow(products.view().RowRange(i, 1), slots[i], append.gram));
  }
  return absl::OkStatus();
}

}  // namespace precondor

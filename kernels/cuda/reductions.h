// SPDX-License-Identifier: Apache-2.0
// Sums over matrices in f64. The order of a sum is a function of the shape alone: partial sums of fixed pieces, added
// in the order of the pieces, so that every run gives the same bits.
//
// Views are of device memory; `out` and `partials` are device memory too. Each call is one launch, or two where it
// takes partials, and returns the first launch error. What each computes is Backend's contract (kernels/backend.h).
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// f64 elements of `partials` for a reduction of x to one number: the pieces that it is summed by.
constexpr int64_t ReductionPartials(ConstMatrixView x) {
  constexpr int64_t kElementsOfPiece = 4096, kMaxPieces = 1024;
  const int64_t pieces = (x.size() + kElementsOfPiece - 1) / kElementsOfPiece;
  return pieces < 1 ? 1 : pieces > kMaxPieces ? kMaxPieces : pieces;
}

// Many in one: `jobs` [count] in device memory. out[i] is of job i, partials [pieces], which are all jobs' together.
struct DotJob {
  ConstMatrixView x;
  ConstMatrixView y;
  int64_t first = 0;  // pieces of all jobs before this one
};
cudaError_t Dots(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, double* partials, double* out);
// out [rows]: of all jobs' rows, one job behind the other. No matrix is without rows.
struct RowNormsJob {
  ConstMatrixView x;
  int64_t first = 0;  // rows of all jobs before this one
};
cudaError_t RowSquaredNorms(cudaStream_t stream, const RowNormsJob* jobs, int count, int64_t rows, double* out);

// out[0] = the result.
cudaError_t AbsoluteSum(cudaStream_t stream, ConstMatrixView x, double* partials, double* out);
cudaError_t AbsoluteMaximum(cudaStream_t stream, ConstMatrixView x, double* partials, double* out);
// out[0] = the number of elements that are not finite, of those on and below the diagonal if `lower`.
cudaError_t CountNonFinite(cudaStream_t stream, ConstMatrixView x, bool lower, double* partials, double* out);

// Many in one: `jobs` [count] in device memory, of `blocks` blocks in all. The second launch is for those with
// partials.
struct ColumnNormsJob {
  ConstMatrixView x;
  double* partials = nullptr;  // ColumnPartials(x)
  double* out = nullptr;       // [x.cols]
  int64_t first = 0;           // blocks of all jobs before this one
};
// 0 for a matrix that is summed in one piece.
int64_t ColumnPartials(ConstMatrixView x);
int64_t ColumnNormsBlocks(ConstMatrixView x);
cudaError_t ColumnSquaredNorms(cudaStream_t stream, const ColumnNormsJob* jobs, int count, int64_t blocks);
cudaError_t ColumnSumPartials(cudaStream_t stream, const ColumnNormsJob* jobs, int count);
// out[rows].
cudaError_t Diagonal(cudaStream_t stream, ConstMatrixView a, double* out);

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// Sums over matrices in f64. A sum is made of the partial sums of fixed pieces, which are added in a fixed order. The
// order depends on the shape alone, so every run gives the same bits.
//
// Views, `out` and `partials` are in device memory. Each function is one launch, or two if it takes partials, and
// returns the first launch error. Backend's contract (kernels/backend.h) says what each computes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Returns the number of pieces for a reduction of x to one number, which is the number of elements of `partials`.
constexpr int64_t ReductionPartials(ConstMatrixView x) {
  constexpr int64_t kElementsOfPiece = 4096, kMaxPieces = 1024;
  const int64_t pieces = (x.size() + kElementsOfPiece - 1) / kElementsOfPiece;
  return pieces < 1 ? 1 : pieces > kMaxPieces ? kMaxPieces : pieces;
}

// Compute many dot products, sums of |x_ij|, or the largest |x_ij| (NaN if one is NaN): out[i] is that of job i, for
// `jobs` [count] in device memory. partials [pieces] is for all jobs together.
struct DotJob {
  ConstMatrixView x;
  ConstMatrixView y;  // x, unless it is a dot product
  int64_t first = 0;  // pieces of all jobs before this one
};
cudaError_t Dots(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, double* partials, double* out);
cudaError_t AbsoluteSums(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, double* partials,
                         double* out);
cudaError_t AbsoluteMaxima(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, double* partials,
                           double* out);

// Computes the squared norms of the rows of all jobs: out [rows] has one job's rows after another's. Precondition: each
// matrix has rows.
struct RowNormsJob {
  ConstMatrixView x;
  int64_t first = 0;  // rows of all jobs before this one
};
cudaError_t RowSquaredNorms(cudaStream_t stream, const RowNormsJob* jobs, int count, int64_t rows, double* out);

// Sets out[0] to the number of elements that are not finite; if `lower`, only of elements on and below the diagonal.
cudaError_t CountNonFinite(cudaStream_t stream, ConstMatrixView x, bool lower, double* partials, double* out);

// Squared norms of columns, for `jobs` [count] in device memory, of `blocks` blocks in all. Call ColumnSquaredNorms,
// and then ColumnSumPartials if a job has partials.
struct ColumnNormsJob {
  ConstMatrixView x;
  double* partials = nullptr;  // [ColumnPartials(x)]
  double* out = nullptr;       // [x.cols]
  int64_t first = 0;           // blocks of all jobs before this one
};
// Returns the number of elements of `partials`; 0 if the matrix is summed in one piece.
int64_t ColumnPartials(ConstMatrixView x);
int64_t ColumnNormsBlocks(ConstMatrixView x);
cudaError_t ColumnSquaredNorms(cudaStream_t stream, const ColumnNormsJob* jobs, int count, int64_t blocks);
cudaError_t ColumnSumPartials(cudaStream_t stream, const ColumnNormsJob* jobs, int count);
// Sets out [rows] to the diagonal of a.
cudaError_t Diagonal(cudaStream_t stream, ConstMatrixView a, double* out);

}  // namespace precondor::cuda

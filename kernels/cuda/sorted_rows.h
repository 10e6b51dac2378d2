// SPDX-License-Identifier: Apache-2.0
// Sorts the rows of many matrices in two launches: RowEstimates, then SortRows.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// `sorted` receives the rows of p [n, n] by falling q_i' p_i, each divided by its norm; of equal ones the first comes
// first. Pointers are to device memory. If an estimate is not finite, `sorted` becomes NaN.
struct SortedRowsJob {
  ConstMatrixView q, p;
  double* estimates = nullptr;  // [n]
  double* squares = nullptr;    // [n]
  MatrixView sorted;
  int* order = nullptr;  // [n]; row i of `sorted` is row order[i] of p
  int64_t first = 0;     // rows of all jobs before this one
};
// Run `jobs` [count], in device memory, of `rows` rows in all. RowEstimates sets estimates[i] = q_i' p_i and squares[i]
// = |p_i|^2.
cudaError_t RowEstimates(cudaStream_t stream, const SortedRowsJob* jobs, int count, int64_t rows);
cudaError_t SortRows(cudaStream_t stream, const SortedRowsJob* jobs, int count, int64_t rows);

}  // namespace precondor::cuda

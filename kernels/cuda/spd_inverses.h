// SPDX-License-Identifier: Apache-2.0
// Inverts many small symmetric positive definite matrices in one launch, one block a matrix, in f64. At these sizes
// cuSOLVER, which takes one matrix a call, leaves the device idle.
//
// A block keeps the packed lower triangle of its matrix in shared memory if it fits (up to 224 rows on devices with 227
// KiB a block), and otherwise in `work`. The operations, and so the bits, are the same in both cases.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Larger matrices are too much work for one block.
constexpr int64_t kMostRowsOfSpdInverse = 256;

// x = a^-1, or x = s (I + s a s)^-1 s if `roots`, the diagonal of s, is not null.
struct SpdInverseJob {
  ConstMatrixView a;              // lower triangle read; packed [1, n (n + 1) / 2] if there are roots
  const double* roots = nullptr;  // [n]
  MatrixView x;                   // [n, n], both triangles; may be a; unchanged if there is no inverse
  float* packed = nullptr;        // if not null, becomes x's lower triangle, row after row
  double* work = nullptr;         // [SpdInverseWork(n)]
};
constexpr int64_t SpdInverseWork(int64_t n) { return n * (n + 1) / 2; }

// Runs `jobs` [count], in device memory; most_rows is the number of rows of the largest. Sets infos[i], in device
// memory, to 0 for success, to the number, from 1, of a leading minor that is not positive, or to -1 if an element is
// not finite.
cudaError_t SpdInverses(cudaStream_t stream, const SpdInverseJob* jobs, int count, int64_t most_rows, int* infos);

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// Inverses of many small symmetric positive definite matrices in one launch: a block each, all in f64, by Cholesky's
// decomposition. For sizes at which cuSOLVER's one matrix a call leaves a device idle.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Beyond it a matrix is too much for one block.
constexpr int64_t kMostRowsOfSpdInverse = 256;

// x = a^-1, or, where there are roots s, x = s (I + s a s)^-1 s.
struct SpdInverseJob {
  ConstMatrixView a;              // lower triangle read; packed [1, n (n + 1) / 2] where there are roots
  const double* roots = nullptr;  // [n]
  MatrixView x;                   // [n, n], both triangles; may be a; left alone where there is no inverse
  float* packed = nullptr;        // unless null, x's lower triangle too, row after row
  double* work = nullptr;         // SpdInverseWork(n) elements
};
constexpr int64_t SpdInverseWork(int64_t n) { return 2 * n * n; }

// infos[i] of job i: 0, the leading minor that is not positive, counted from 1, or -1 where an element is not finite.
// `jobs` [count] and infos in device memory.
cudaError_t SpdInverses(cudaStream_t stream, const SpdInverseJob* jobs, int count, int* infos);

}  // namespace precondor::cuda

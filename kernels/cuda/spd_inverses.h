// SPDX-License-Identifier: Apache-2.0
// Inverses of many small symmetric positive definite matrices in one launch: a block each, all in f64. For sizes at
// which cuSOLVER's one matrix a call leaves a device idle.
//
// A block keeps its matrix's lower triangle packed in shared memory where it fits, up to 224 rows on devices with
// 227 KiB a block, and otherwise in `work`; the operations, and so the bits, are the same.
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
constexpr int64_t SpdInverseWork(int64_t n) { return n * (n + 1) / 2; }

// infos[i] of job i: 0, the leading minor that is not positive, counted from 1, or -1 where an element is not finite.
// `jobs` [count] and infos in device memory; most_rows is the largest job's.
cudaError_t SpdInverses(cudaStream_t stream, const SpdInverseJob* jobs, int count, int64_t most_rows, int* infos);

}  // namespace precondor::cuda

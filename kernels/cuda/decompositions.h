// SPDX-License-Identifier: Apache-2.0
// Kernels that prepare and complete decompositions of many symmetric matrices by cuSOLVER, in f64 on copies.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

struct DecompositionJob {
  ConstMatrixView a;           // [n, n], lower triangle read
  double* wide = nullptr;      // [n, n] contiguous: a in f64, and later the result
  double* identity = nullptr;  // if not null, [n, n] contiguous: becomes I
  const int* info = nullptr;   // cuSOLVER's info
  MatrixView x;                // [n, n]; unchanged if there is no result; no rows if it is not wanted
  bool symmetric = false;      // the result is, and one triangle of it is read
};

// For `jobs` [count] in device memory, sets wide to both triangles of a. outcomes[i], in device memory, becomes 0, or
// -1 if an element is not finite; such an element becomes 0, so that it cannot disturb other matrices of a batch.
cudaError_t WidenSymmetric(cudaStream_t stream, const DecompositionJob* jobs, int count, double* outcomes);
// Sets x to wide where outcome and info are 0. An outcome of 0 becomes info.
cudaError_t NarrowResults(cudaStream_t stream, const DecompositionJob* jobs, int count, double* outcomes);

}  // namespace precondor::cuda

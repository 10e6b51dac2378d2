// SPDX-License-Identifier: Apache-2.0
// Kernels that prepare and complete cuSOLVER's eigendecompositions of many small symmetric matrices, one block a
// matrix.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Larger matrices occupy cuSOLVER one at a time, and its routine for one matrix is faster.
constexpr int64_t kMostRowsOfSymmetricEigens = 512;

struct SymmetricEigenJob {
  ConstMatrixView a;          // [n, n], lower triangle read
  double* wide = nullptr;     // [n, n] contiguous: a in f64, then its eigenvectors as rows
  const int* info = nullptr;  // cuSOLVER's info
  double* outcome = nullptr;  // becomes 0, -1 if an element of a is not finite, or info
  MatrixView q;               // unchanged if the outcome is not 0
};

// For `jobs` [count] in device memory, sets wide to both triangles of a, and outcome. If an element of a is not finite,
// wide becomes zeros, so that it cannot disturb the other matrices of a batch.
cudaError_t WidenSymmetric(cudaStream_t stream, const SymmetricEigenJob* jobs, int count);
// Sets q to wide, and completes outcome.
cudaError_t NarrowEigenvectors(cudaStream_t stream, const SymmetricEigenJob* jobs, int count);

}  // namespace precondor::cuda

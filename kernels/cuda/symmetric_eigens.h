// SPDX-License-Identifier: Apache-2.0
// What goes before and after cuSOLVER's eigendecompositions of many small symmetric matrices: a block each.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// From here on cuSOLVER has enough to do with one matrix, and its routine for one is the faster.
constexpr int64_t kMostRowsOfSymmetricEigens = 512;

struct SymmetricEigenJob {
  ConstMatrixView a;          // [n, n], lower triangle read
  double* wide = nullptr;     // [n, n] contiguous: a in f64, then its eigenvectors as rows
  const int* info = nullptr;  // what cuSOLVER says
  double* outcome = nullptr;  // 0, -1 where an element of a is not finite, or info
  MatrixView q;               // left alone where the outcome is not 0
};

// `jobs` [count] in device memory. wide = a, both triangles; zeros where an element of a is not finite, so that the
// others of a batch are none the worse for it.
cudaError_t WidenSymmetric(cudaStream_t stream, const SymmetricEigenJob* jobs, int count);
// q = wide.
cudaError_t NarrowEigenvectors(cudaStream_t stream, const SymmetricEigenJob* jobs, int count);

}  // namespace precondor::cuda

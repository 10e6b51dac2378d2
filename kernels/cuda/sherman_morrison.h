// SPDX-License-Identifier: Apache-2.0
// Computes the terms of Sherman-Morrison steps for many matrices in one launch, one block a matrix. The vectors are
// few, and their product with the stored matrix is given.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Each vector costs the block another pass over all earlier ones.
constexpr int64_t kMostVectorsOfTerms = 16;
constexpr int64_t kMostRowsOfTerms = 32;

// One operation, as Backend::ShermanMorrisonTerms defines it, one vector after another. Vector a is v_a = factor v[a];
// t_b are the terms of the vectors before it: u = v_a h - sum_b t_b (t_b'v_a), t_a = u / sqrt(1 + max(u'v_a, 0)). Sums
// are in f64. Pointers are to device memory.
struct ShermanMorrisonJob {
  double scale = 1.0;  // coefficient of y
  double shift = 0.0;
  double factor = 1.0;              // coefficient of v
  const double* weights = nullptr;  // [rows.rows]
  ConstMatrixView rows;             // [p, n], p <= kMostRowsOfTerms
  ConstMatrixView v;                // [k, n], k <= kMostVectorsOfTerms
  ConstMatrixView y;                // [k, n], the product v m
  MatrixView terms;                 // [k, n]
  double* squares = nullptr;        // [n], or null
  // Becomes 1 if the product of a vector with h is not finite, else 0.
  double* infinite = nullptr;
};
// Runs `jobs` [count], in device memory.
cudaError_t ShermanMorrisonTerms(cudaStream_t stream, const ShermanMorrisonJob* jobs, int count);

}  // namespace precondor::cuda

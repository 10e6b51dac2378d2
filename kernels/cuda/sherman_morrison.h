// SPDX-License-Identifier: Apache-2.0
// The terms of Sherman-Morrison steps, many matrices in one launch: a block takes a matrix, whose vectors are few and
// whose product with what is stored is there.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Each vector is another walk of the block over all that come before it.
constexpr int64_t kMostVectorsOfTerms = 16;
constexpr int64_t kMostRowsOfTerms = 32;

// As Backend::ShermanMorrisonTerms says, one vector after the other: with t_b those of the vectors before,
// u = v_a h - sum_b t_b (t_b'v_a), t_a = u / sqrt(1 + max(u'v_a, 0)). Sums run in f64. Pointers are to device memory.
struct ShermanMorrisonJob {
  double scale = 1.0;  // of y
  double shift = 0.0;
  double factor = 1.0;              // of v
  const double* weights = nullptr;  // [rows.rows]
  ConstMatrixView rows;             // [p, n], p <= kMostRowsOfTerms
  ConstMatrixView v;                // [k, n], k <= kMostVectorsOfTerms
  ConstMatrixView y;                // [k, n], v m
  MatrixView terms;                 // [k, n]
  double* squares = nullptr;        // [n], or null
  double* infinite = nullptr;       // becomes 1 where a product of a vector with h is not finite, else 0
};
// `jobs` [count] in device memory.
cudaError_t ShermanMorrisonTerms(cudaStream_t stream, const ShermanMorrisonJob* jobs, int count);

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// Computes products of many callers in one launch, in f32.
//
// A block computes 64 x 64 elements of one product and adds over the inner dimension in a fixed order. So a product's
// bits depend on its own shape alone, and not on other products of the launch. cuBLAS chooses its kernels itself, and
// does not promise this of a group.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// c = alpha op(a) op(b) + beta c, as Backend::Gemm. Pointers are to device memory.
struct ProductJob {
  float alpha = 1;
  float beta = 0;
  bool transpose_a = false;
  bool transpose_b = false;
  ConstMatrixView a;
  ConstMatrixView b;
  MatrixView c;
  int64_t inner = 0;
  int64_t first = 0;  // blocks of all jobs before this one
};
// Returns the number of blocks of a job: of 64 x 64 tiles of c.
int64_t ProductBlocks(const ProductJob& job);
// Run one job, in host memory, or `count` jobs in device memory, of `blocks` blocks in all.
cudaError_t Product(cudaStream_t stream, const ProductJob& job);
cudaError_t Products(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda

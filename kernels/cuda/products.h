// SPDX-License-Identifier: Apache-2.0
// Small products of many callers in one launch, in f32.
//
// A block makes 64 x 64 elements of one product and adds them up over the whole inner dimension in its order, so that a
// product's bits depend on its own shape alone, not on what runs beside it. cuBLAS, which chooses its kernels, would
// not promise that of a group.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// c = alpha op(a) op(b) + beta c, as Backend::Gemm says. Pointers are to device memory.
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
int64_t ProductBlocks(MatrixView c);
// `job` is in host memory; `jobs` [count], of `blocks` blocks in all, in device memory.
cudaError_t Product(cudaStream_t stream, const ProductJob& job);
cudaError_t Products(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda

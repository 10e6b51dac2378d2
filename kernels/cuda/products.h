// SPDX-License-Identifier: Apache-2.0
// Products of many callers in one launch, in f32 or on tensor cores.
//
// A block makes 64 x 64 elements of one product, on tensor cores twice as many, and adds them up over the inner
// dimension in its order, or over a part of it; the last block of an element's parts adds these up in theirs. So a
// product's bits depend on its own shape alone, not on what runs beside it. cuBLAS, which chooses its kernels, would
// not promise that of a group.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// c = alpha op(a) op(b) + beta source, as Backend::Gemm says of source = c. Pointers are to device memory.
struct ProductJob {
  float alpha = 1;
  float beta = 0;
  bool transpose_a = false;
  bool transpose_b = false;
  ConstMatrixView a;
  ConstMatrixView b;
  MatrixView c;
  int64_t inner = 0;
  ConstMatrixView source;  // the same shape and place as c, or apart from it
  // The inner dimension in so many parts: memory for their sums, and a 0 for each tile.
  int parts = 1;
  float* partials = nullptr;
  unsigned* arrived = nullptr;
  // Unless null, becomes |source|^2 and |c|^2: memory for 2 numbers of each tile, and a 0 of its own.
  double* squares = nullptr;
  double* tile_squares = nullptr;
  unsigned* squares_arrived = nullptr;
  bool in_two_terms = false;  // on tensor cores: a and b as sums of two bf16 numbers, not one
  int64_t first = 0;          // blocks of all jobs before this one
};
int64_t ProductTiles(ConstMatrixView c);
// Parts for a product of few tiles and a long inner dimension, so that it occupies more of a device; 1 for others. They
// depend on nothing else.
int ProductParts(ConstMatrixView c, int64_t inner);
// Elements of memory for the parts' sums.
int64_t ProductPartials(ConstMatrixView c, int64_t inner);
inline int64_t ProductBlocks(const ProductJob& job) { return ProductTiles(job.c) * job.parts; }
// `job` is in host memory, in one part and without squares; `jobs` [count], of `blocks` blocks in all, in device
// memory.
cudaError_t Product(cudaStream_t stream, const ProductJob& job);
cudaError_t Products(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks);
// The same with a and b rounded to bf16, kBf16 or kBf16x3 of kernels/base/product_precision.h.
int64_t TensorProductBlocks(const ProductJob& job);
cudaError_t TensorProducts(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda

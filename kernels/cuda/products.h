// SPDX-License-Identifier: Apache-2.0
// Computes products of many callers in one launch, in f32 or on tensor cores.
//
// A block computes 64 x 64 elements of one product (twice as many on tensor cores). It adds over the inner dimension,
// or over a part of it, in a fixed order; if there are parts, the last block of a tile adds the sums of its parts in
// their order. So a product's bits depend on its own shape alone, and not on other products of the launch. cuBLAS
// chooses its kernels itself, and does not promise this of a group.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// c = alpha op(a) op(b) + beta source. With source = c it is Backend::Gemm. Pointers are to device memory.
struct ProductJob {
  float alpha = 1;
  float beta = 0;
  bool transpose_a = false;
  bool transpose_b = false;
  ConstMatrixView a;
  ConstMatrixView b;
  MatrixView c;
  int64_t inner = 0;
  // Has the shape of c. Its memory is c's, or does not overlap with c.
  ConstMatrixView source;
  // Number of parts of the inner dimension, memory for their sums (ProductPartials elements), and a counter for each
  // tile that is 0 before the launch.
  int parts = 1;
  float* partials = nullptr;
  unsigned* arrived = nullptr;
  // If not null, becomes |source|^2 and |c|^2. Then tile_squares has memory for 2 numbers of each tile, and
  // squares_arrived is a counter that is 0 before the launch.
  double* squares = nullptr;
  double* tile_squares = nullptr;
  unsigned* squares_arrived = nullptr;
  bool in_two_terms = false;  // on tensor cores: elements of a and b are sums of two bf16 numbers, not one
  int64_t first = 0;          // blocks of all jobs before this one
};
// Returns the number of 64 x 64 tiles of c.
int64_t ProductTiles(ConstMatrixView c);
// Returns the number of parts for a product. It is more than 1 if c has few tiles and the inner dimension is long, so
// that the product occupies more of the device. It depends on the shape alone.
int ProductParts(ConstMatrixView c, int64_t inner);
// Returns the number of elements of memory for the parts' sums; 0 for one part.
int64_t ProductPartials(ConstMatrixView c, int64_t inner);
inline int64_t ProductBlocks(const ProductJob& job) { return ProductTiles(job.c) * job.parts; }
// Run one job, in host memory, which has one part and no squares; or `count` jobs in device memory, of `blocks` blocks
// in all.
cudaError_t Product(cudaStream_t stream, const ProductJob& job);
cudaError_t Products(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks);
// Like ProductBlocks and Products, on tensor cores: a and b are rounded to bf16, as kBf16 or kBf16x3 (in_two_terms) of
// kernels/base/product_precision.h say.
int64_t TensorProductBlocks(const ProductJob& job);
cudaError_t TensorProducts(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda

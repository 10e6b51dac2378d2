// SPDX-License-Identifier: Apache-2.0
// Products of many matrices of one shape in one call of cuBLAS.
//
// cuBLAS promises the same bits for the same call alone. So that a product has the same bits in any company, the number
// of products in a batch depends on their shape alone: BatchSize for long sequences of products in bf16,
// fixed_batches.h for others (docs/develop/adr/0031-newton-schulz-in-batches.md,
// docs/develop/adr/0034-low-rank-by-batched-cublas.md).
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <cublas_v2.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/cuda/device.h"
#include "kernels/cuda/packed_upload.h"

namespace precondor::cuda {

// Types of the factors' elements, of arithmetic, and of the results' elements.
struct Arithmetic {
  cudaDataType_t type;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType_t result = type;
};
inline constexpr Arithmetic kInBf16{CUDA_R_16BF}, kInF32{CUDA_R_32F}, kInTf32{CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32};

// c [rows, cols] = alpha op(a) op(b) + beta c, row-major. `inner` is the length of the sums.
struct ProductShape {
  int64_t rows, cols, inner, stride_a, stride_b, stride_c;
  float alpha = 1, beta = 0;
  bool transpose_a = false, transpose_b = false;

  auto operator<=>(const ProductShape&) const = default;
};

// Returns the number of products, [rows, cols] with sums of length `inner`, in a batch: 256, or fewer that take 34
// GFLOP together, some 60 us of a large device in bf16.
int64_t BatchSize(int64_t rows, int64_t cols, int64_t inner);
// Returns the number of places in as many batches of `size` as `count` products need.
constexpr size_t PlacesOf(size_t count, int64_t size) {
  const size_t of_batch = static_cast<size_t>(size);
  return (count + of_batch - 1) / of_batch * of_batch;
}

// Arrays of the matrices' addresses.
struct Pointers {
  PackedUpload::Part<void*> a, b, c;
};

// Returns the stride with which rows of T begin at multiples of 16 bytes. In bf16 and TF32 cuBLAS requires this of a
// matrix, and is faster if each row does.
template <typename T>
constexpr int64_t PaddedStride(int64_t cols) {
  constexpr int64_t kElements = 16 / sizeof(T);
  return (cols + kElements - 1) / kElements * kElements;
}

// Runs products [begin, end) in stream order. The addresses in `upload` have been sent.
absl::Status RunBatch(Device& device, absl::string_view what, const ProductShape& shape, const Arithmetic& in,
                      const PackedUpload& upload, const Pointers& pointers, size_t begin, size_t end);

}  // namespace precondor::cuda

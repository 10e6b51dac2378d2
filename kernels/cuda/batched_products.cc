// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/batched_products.h"

#include <algorithm>

namespace precondor::cuda {

int64_t BatchSize(int64_t rows, int64_t cols, int64_t inner) {
  constexpr int64_t kMostProducts = 256, kMultiplications = int64_t{1} << 34;
  return std::clamp<int64_t>(kMultiplications / (rows * cols * inner), 1, kMostProducts);
}

// cuBLAS expects column-major matrices, for which a row-major matrix is its transpose: the factors of a product swap.
absl::Status RunBatch(Device& device, absl::string_view what, const ProductShape& s, const Arithmetic& in,
                      const PackedUpload& upload, const Pointers& pointers, size_t begin, size_t end) {
  const cublasOperation_t op_a = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t op_b = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  return device.RunBlas(what, [&](cublasHandle_t blas) {
    if (end - begin == 1) {
      const auto only = [&](PackedUpload::Part<void*> part) { return upload.OnHost(part)[begin]; };
      return cublasGemmEx_64(blas, op_b, op_a, s.cols, s.rows, s.inner, &s.alpha, only(pointers.b), in.type, s.stride_b,
                             only(pointers.a), in.type, s.stride_a, &s.beta, only(pointers.c), in.result, s.stride_c,
                             in.compute, CUBLAS_GEMM_DEFAULT);
    }
    const auto all = [&](PackedUpload::Part<void*> part) { return upload.OnDevice(part) + begin; };
    return cublasGemmBatchedEx_64(blas, op_b, op_a, s.cols, s.rows, s.inner, &s.alpha, all(pointers.b), in.type,
                                  s.stride_b, all(pointers.a), in.type, s.stride_a, &s.beta, all(pointers.c), in.result,
                                  s.stride_c, static_cast<int64_t>(end - begin), in.compute, CUBLAS_GEMM_DEFAULT);
  });
}

}  // namespace precondor::cuda

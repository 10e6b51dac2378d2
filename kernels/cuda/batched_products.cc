// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/batched_products.h"

#include <algorithm>

#include "kernels/base/status_macros.h"

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

int64_t FixedBatches::Size(const ProductShape& shape) {
  constexpr int64_t kMostProducts = 256, kMultiplications = int64_t{1} << 32;
  return std::clamp<int64_t>(kMultiplications / (shape.rows * shape.cols * shape.inner), 1, kMostProducts);
}

void FixedBatches::Add(size_t stage, const ProductShape& shape, const void* a, const void* b, void* c) {
  Group& group = stages_[stage][shape];
  group.products.push_back({a, b, c});
  group.places = PlacesOf(group.products.size(), Size(shape));
}

absl::Status FixedBatches::Open(Device& device, size_t element_bytes) {
  if (empty()) return absl::OkStatus();
  int64_t spare = 0;
  for (auto& stage : stages_) {
    for (auto& [shape, group] : stage) {
      for (PackedUpload::Part<void*>* part : {&group.pointers.a, &group.pointers.b, &group.pointers.c}) {
        *part = addresses_.Add<void*>(group.places);
      }
      if (group.places > group.products.size()) spare = std::max(spare, shape.rows * shape.stride_c);
    }
  }
  PRECONDOR_RETURN_IF_ERROR(addresses_.Open(device));
  PRECONDOR_ASSIGN_OR_RETURN(spare_, device.Array<char>(spare * static_cast<int64_t>(element_bytes)));
  for (const auto& stage : stages_) {
    for (const auto& [shape, group] : stage) {
      for (size_t i = 0; i < group.places; ++i) {
        const bool used = i < group.products.size();
        const Product& product = group.products[used ? i : 0];
        addresses_.OnHost(group.pointers.a)[i] = const_cast<void*>(product.a);
        addresses_.OnHost(group.pointers.b)[i] = const_cast<void*>(product.b);
        addresses_.OnHost(group.pointers.c)[i] = used ? product.c : spare_.data();
      }
    }
  }
  return addresses_.Send(device);
}

absl::Status FixedBatches::Run(Device& device, absl::string_view what, size_t stage, const Arithmetic& in) const {
  for (const auto& [shape, group] : stages_[stage]) {
    const auto size = static_cast<size_t>(Size(shape));
    for (size_t begin = 0; begin < group.places; begin += size) {
      PRECONDOR_RETURN_IF_ERROR(RunBatch(device, what, shape, in, addresses_, group.pointers, begin, begin + size));
    }
  }
  return absl::OkStatus();
}

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/batched_products.h"

#include <algorithm>
#include <tuple>

#include "kernels/base/status_macros.h"

namespace precondor::cuda {
namespace {

auto KeyOf(const ProductShape& s) {
  return std::tie(s.rows, s.cols, s.inner, s.stride_a, s.stride_b, s.stride_c, s.alpha, s.beta, s.transpose_a,
                  s.transpose_b);
}

}  // namespace

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

absl::Status ProductBatches::Open(Device& device) {
  if (products_.empty()) return absl::OkStatus();
  std::stable_sort(products_.begin(), products_.end(),
                   [](const Product& a, const Product& b) { return KeyOf(a.shape) < KeyOf(b.shape); });
  // Places of products of one shape follow each other. Those that are unused have the operands of the shape's first
  // product, and share a result.
  std::vector<Product> places;
  int64_t unused = 0;
  for (size_t begin = 0, end = 0; begin < products_.size(); begin = end) {
    const Product& first = products_[begin];
    while (end < products_.size() && KeyOf(products_[end].shape) == KeyOf(first.shape)) ++end;
    const int64_t size = BatchSize(first.shape.rows, first.shape.cols, first.shape.inner);
    const size_t place = places.size(), wanted = place + PlacesOf(end - begin, size);
    places.insert(places.end(), products_.begin() + static_cast<std::ptrdiff_t>(begin),
                  products_.begin() + static_cast<std::ptrdiff_t>(end));
    if (places.size() < wanted) {
      unused = std::max(unused, first.shape.rows * first.shape.stride_c);
      places.resize(wanted, {first.shape, first.a, first.b, nullptr});
    }
    for (size_t at = place; at < wanted; at += static_cast<size_t>(size)) {
      batches_.push_back({first.shape, at, static_cast<size_t>(size)});
    }
  }
  for (auto* part : {&pointers_.a, &pointers_.b, &pointers_.c}) *part = upload_.Add<void*>(places.size());
  PRECONDOR_RETURN_IF_ERROR(upload_.Open(device));
  PRECONDOR_ASSIGN_OR_RETURN(unused_, device.Array<float>(unused));
  for (size_t i = 0; i < places.size(); ++i) {
    upload_.OnHost(pointers_.a)[i] = const_cast<float*>(places[i].a);
    upload_.OnHost(pointers_.b)[i] = const_cast<float*>(places[i].b);
    upload_.OnHost(pointers_.c)[i] = places[i].c != nullptr ? places[i].c : unused_.data();
  }
  return upload_.Send(device);
}

absl::Status ProductBatches::RunNext(Device& device, absl::string_view what) {
  const Batch& batch = batches_[next_++];
  return RunBatch(device, what, batch.shape, in_, upload_, pointers_, batch.place, batch.place + batch.places);
}

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// Products of many matrices of one shape in one call of cuBLAS, and the answers to their callers.
//
// cuBLAS promises the same bits for the same call alone. So that a product has the same bits in any company, the number
// of products in a batch depends on their shape alone: BatchSize for long sequences of products in bf16, FixedBatches
// for others (docs/develop/adr/0031-newton-schulz-in-batches.md, docs/develop/adr/0034-low-rank-by-batched-cublas.md).
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cublas_v2.h>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/status_macros.h"
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
  int64_t rows, cols, inner, stride_a = 0, stride_b = 0, stride_c = 0;
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
// Returns the number of elements that a matrix of `elements` takes in a common array, so that the next one begins at a
// multiple of 256 bytes. cuBLAS may choose another kernel for other alignments, and an operation's result must not
// depend on the operations before it.
template <typename T>
constexpr int64_t PaddedElements(int64_t elements) {
  constexpr int64_t kElements = 256 / sizeof(T);
  return (elements + kElements - 1) / kElements * kElements;
}

// Runs products [begin, end) in stream order. The addresses in `upload` have been sent.
absl::Status RunBatch(Device& device, absl::string_view what, const ProductShape& shape, const Arithmetic& in,
                      const PackedUpload& upload, const Pointers& pointers, size_t begin, size_t end);

// Products of many callers, in calls of cuBLAS whose number of products depends on their shape alone. So a product is
// the same call in any company, but for addresses and its place in the call. Stages run one after another; products of
// a stage do not depend on each other. Places of a call without a product repeat the factors of another one, and all
// write one spare piece of memory. Not thread-safe.
class FixedBatches {
 public:
  explicit FixedBatches(size_t stages) : stages_(stages) {}

  // Returns the number of products of one shape in a call: as many as occupy a device, 256 at most.
  static int64_t Size(const ProductShape& shape);

  void Add(size_t stage, const ProductShape& shape, const void* a, const void* b, void* c);
  bool empty() const {
    return std::all_of(stages_.begin(), stages_.end(), [](const auto& stage) { return stage.empty(); });
  }
  // Allocates all memory and sends the addresses. Call it when all products have been added. element_bytes: the largest
  // size of an element of a result.
  absl::Status Open(Device& device, size_t element_bytes);
  // Runs the products of a stage in stream order.
  absl::Status Run(Device& device, absl::string_view what, size_t stage, const Arithmetic& in) const;

 private:
  struct Product {
    const void *a, *b;
    void* c;
  };
  struct Group {
    std::vector<Product> products;
    size_t places = 0;
    Pointers pointers;
  };

  std::vector<std::map<ProductShape, Group>> stages_;
  PackedUpload addresses_;
  DeviceArray<char> spare_;
};

// Copies |d|^2 and |u|^2 to the span `squares` [2] of each operation that asks for them; the span of every other
// operation is empty. The array `squares` on the device has one pair for each operation that asks, in the order of
// `operations`, which holds pointers to operations. Waits for the device if at least one operation asks.
template <typename Operations>
absl::Status ReceiveSquares(Device& device, const DeviceArray<double>& squares, const Operations& operations) {
  size_t asked = 0;
  for (const auto* operation : operations) asked += operation->squares.empty() ? 0 : 1;
  if (asked == 0) return absl::OkStatus();
  std::vector<double> known(2 * asked);
  PRECONDOR_RETURN_IF_ERROR(device.Receive(squares, absl::MakeSpan(known)));
  auto pair = known.begin();
  for (const auto* operation : operations) {
    if (operation->squares.empty()) continue;
    std::copy_n(pair, 2, operation->squares.begin());
    pair += 2;
  }
  return absl::OkStatus();
}

}  // namespace precondor::cuda

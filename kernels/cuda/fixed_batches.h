// SPDX-License-Identifier: Apache-2.0
// Products of many callers, in calls of cuBLAS whose number of products depends on their shape alone. So a product is
// the same call in any company, but for addresses and its place in the call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/packed_upload.h"

namespace precondor::cuda {

// Products in several stages; those of a stage do not depend on each other. Places of a call without a product repeat
// the factors of another one, and all write one spare piece of memory. Not thread-safe.
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

}  // namespace precondor::cuda

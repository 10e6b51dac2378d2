// SPDX-License-Identifier: Apache-2.0
// Uploads arrays of several types to the device in one copy. Call Add for each array, then Open, which allocates the
// memory, fill the arrays on the host, and call Send, which copies in stream order. Device addresses are known after
// Open, so that the content of one array can point to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/device.h"

namespace precondor::cuda {

// Not thread-safe. Owns the arrays on the device.
class PackedUpload {
 public:
  template <typename T>
  struct Part {
    size_t offset = 0;
    size_t size = 0;
  };

  // Adds an array of `size` zeros. Precondition: Open has not been called.
  template <typename T>
  Part<T> Add(size_t size) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= kAlignment);
    const Part<T> part{units_ * kAlignment, size};
    units_ += (size * sizeof(T) + kAlignment - 1) / kAlignment;
    return part;
  }
  absl::Status Open(Device& device) {
    host_.resize(units_);
    PRECONDOR_ASSIGN_OR_RETURN(memory_, device.Array<Unit>(static_cast<int64_t>(units_)));
    return absl::OkStatus();
  }
  absl::Status Send(Device& device) const { return device.Fill(memory_, absl::MakeConstSpan(host_)); }

  template <typename T>
  absl::Span<T> OnHost(Part<T> part) {
    return absl::MakeSpan(reinterpret_cast<T*>(reinterpret_cast<char*>(host_.data()) + part.offset), part.size);
  }
  template <typename T>
  absl::Span<const T> OnHost(Part<T> part) const {
    return absl::MakeSpan(reinterpret_cast<const T*>(reinterpret_cast<const char*>(host_.data()) + part.offset),
                          part.size);
  }
  template <typename T>
  T* OnDevice(Part<T> part) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory_.data()) + part.offset);
  }

 private:
  static constexpr size_t kAlignment = 16;
  struct alignas(kAlignment) Unit {
    unsigned char bytes[kAlignment] = {};
  };

  size_t units_ = 0;
  std::vector<Unit> host_;
  DeviceArray<Unit> memory_;
};

}  // namespace precondor::cuda

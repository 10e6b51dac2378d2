// SPDX-License-Identifier: Apache-2.0
// Arrays of several types that go to the device as one copy. First all of them are asked for, then Open finds the
// memory, so that what is written into one may point to another, and Send is on its way in the stream's order.
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

// One thread at a time. Its arrays on the device live as long as it does.
class PackedUpload {
 public:
  template <typename T>
  struct Part {
    size_t offset = 0;
    size_t size = 0;
  };

  // `size` zeros.
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

// SPDX-License-Identifier: Apache-2.0
// Host memory whose size depends on a session's layers. If the system refuses it, the result is a status and the
// process goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace precondor {

// An array of elements that are about to be overwritten: unlike std::vector it does not clear them first. Not
// thread-safe.
template <typename T>
class HostBuffer {
 public:
  HostBuffer() = default;
  // Returns ResourceExhausted, with the number of bytes, if the system refuses the memory.
  static absl::StatusOr<HostBuffer> Make(int64_t size) {
    HostBuffer buffer;
    buffer.data_.reset(new (std::nothrow) T[size]);
    if (buffer.data_ == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("host memory: the system refused ", size * static_cast<int64_t>(sizeof(T)), " bytes"));
    }
    buffer.size_ = size;
    return buffer;
  }

  absl::Span<T> span() { return {data_.get(), static_cast<size_t>(size_)}; }
  absl::Span<const T> span() const { return {data_.get(), static_cast<size_t>(size_)}; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

}  // namespace precondor

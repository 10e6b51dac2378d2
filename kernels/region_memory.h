// SPDX-License-Identifier: Apache-2.0
// One kind of memory that a shard and a worker of one host can share, so that payloads need not pass through a socket
// (docs/develop/adr/0012-device-plane.md): the shard exports a region, the worker maps it, and both copy payloads in
// and out. To add a kind of memory, add a RegionMemory. proto/wire/slot_table.h divides the regions of every kind into
// slots.
//
// Threads: all calls from any thread, several at once. Views are f32, row-major. Every call waits until its effect is
// complete. Errors: Internal for faults of the memory's device, ResourceExhausted for memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/region_kind.h"

namespace precondor {

// Memory that two processes have mapped. In the process that exported it, the destructor frees it; destroy it only
// after the other process has unmapped it or has ended. In the other process, the destructor unmaps it.
class SharedRegion {
 public:
  virtual ~SharedRegion() = default;
  // 256-byte aligned.
  float* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // The argument of Map in another process. Its meaning depends on the kind. Empty in a process that has mapped the
  // region.
  const std::string& handle() const { return handle_; }

 protected:
  SharedRegion(float* data, int64_t bytes, std::string handle)
      : data_(data), bytes_(bytes), handle_(std::move(handle)) {}

 private:
  float* const data_;
  const int64_t bytes_;
  const std::string handle_;
};

// What a shard needs to know about a payload before it admits it.
struct PayloadFacts {
  uint64_t digest = 0;  // kernels/base/payload_digest.h
  bool finite = false;  // true if every element is finite
};

struct RegionCopy {
  ConstMatrixView from;
  MatrixView to;  // of the shape of `from`
};

class RegionMemory {
 public:
  // The size of a region is a multiple of this. A CUDA device cuts smaller allocations out of blocks, and a process
  // that maps a piece of a block would get the whole block.
  static constexpr int64_t kGranularity = int64_t{2} << 20;

  virtual ~RegionMemory() = default;
  virtual RegionKind kind() const = 0;
  // Identifies the memory among those of its kind, by equal bytes in every process. For CUDA the device's UUID, 16
  // bytes.
  virtual const std::string& device() const = 0;

  // Allocates a region that another process can map. `bytes` is rounded up to kGranularity.
  virtual absl::StatusOr<std::unique_ptr<SharedRegion>> Export(int64_t bytes) = 0;
  // Maps a region that another process has exported. Returns Unavailable, with the reason, if that is impossible.
  virtual absl::StatusOr<std::unique_ptr<SharedRegion>> Map(absl::string_view handle, int64_t bytes) = 0;

  // Make copies into a region, out of a region, or outside of regions, with one wait for all. No copy may write what
  // another one reads or writes. After an error the targets are unspecified.
  virtual absl::Status Copy(absl::Span<const RegionCopy> copies) = 0;
  absl::Status Copy(ConstMatrixView from, MatrixView to) {
    const RegionCopy copy = {from, to};
    return Copy({&copy, 1});
  }
  // Return the facts of each payload, with one wait for all.
  virtual absl::StatusOr<std::vector<PayloadFacts>> Inspect(absl::Span<const ConstMatrixView> payloads) = 0;
  absl::StatusOr<PayloadFacts> Inspect(ConstMatrixView payload) {
    const absl::StatusOr<std::vector<PayloadFacts>> facts = Inspect({&payload, 1});
    if (!facts.ok()) return facts.status();
    return facts->front();
  }
};

}  // namespace precondor

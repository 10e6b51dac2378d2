// SPDX-License-Identifier: Apache-2.0
// Memory of one CUDA device that a shard and a worker of one host can share, so that payloads need not pass through a
// socket (docs/develop/adr/0012-device-plane.md): the shard exports a region, the worker maps it, and both copy
// payloads in and out. proto/wire/slot_table.h divides a region into slots. A plane also makes marks in the caller's
// streams, and copies to and from host memory.
//
// Each process copies on a stream that the plane owns. Neither process waits for the other on a stream: a process tells
// its peer of a payload only after the payload is complete, so a peer that dies leaves no stream that waits forever.
//
// Threads: all calls from any thread, several at once. Views are f32, row-major, on the plane's device. Every call
// except Record and Reached waits until the device has completed it. Errors: Internal for faults of the device,
// ResourceExhausted for memory.
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

namespace precondor {

// Memory that two processes have mapped. In the process that exported it, the destructor frees it; destroy it only
// after the other process has unmapped it or has ended. In the other process, the destructor unmaps it.
class SharedRegion {
 public:
  virtual ~SharedRegion() = default;
  // 256-byte aligned.
  float* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // The argument of Map in another process. Empty in a process that has mapped the region.
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

class DevicePlane {
 public:
  // The size of a region is a multiple of this. CUDA cuts smaller allocations out of blocks, and a process
  // that maps a piece of a block would get the whole block.
  static constexpr int64_t kGranularity = int64_t{2} << 20;

  virtual ~DevicePlane() = default;
  // The device's UUID, 16 bytes, equal in every process.
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

  // A point in a stream's work.
  class Mark {
   public:
    virtual ~Mark() = default;
  };

  // Marks the end of the work that the caller has put on `stream` so far. `stream` is a cudaStream_t of this device;
  // null is the default stream. Does not wait. The mark must not outlive the plane.
  virtual absl::StatusOr<std::unique_ptr<Mark>> Record(void* stream) = 0;
  // Returns whether the device has reached the mark. Does not wait, because a caller's stream may never reach it.
  virtual absl::StatusOr<bool> Reached(const Mark& mark) = 0;

  virtual absl::Status Upload(ConstMatrixView host, MatrixView device) = 0;
  virtual absl::Status Download(ConstMatrixView device, MatrixView host) = 0;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Memory of one CUDA device as a kind of shared memory, with marks in the caller's streams and copies to and from host
// memory. Each process copies on a stream that the plane owns. Neither process waits for the other on a stream: a
// process tells its peer of a payload only after the payload is complete, so a peer that dies leaves no stream that
// waits forever.
//
// Threads: all calls from any thread, several at once. Views are f32, row-major, on the plane's device. Every call
// except Record and Reached waits until the device has completed it. Errors: Internal for faults of the device,
// ResourceExhausted for memory.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/matrix_view.h"
#include "kernels/region_memory.h"

namespace precondor {

class DevicePlane : public RegionMemory {
 public:
  // A point in a stream's work.
  class Mark {
   public:
    virtual ~Mark() = default;
  };

  RegionKind kind() const final { return RegionKind::kCuda; }

  // Marks the end of the work that the caller has put on `stream` so far. `stream` is a cudaStream_t of this device;
  // null is the default stream. Does not wait. The mark must not outlive the plane.
  virtual absl::StatusOr<std::unique_ptr<Mark>> Record(void* stream) = 0;
  // Returns whether the device has reached the mark. Does not wait, because a caller's stream may never reach it.
  virtual absl::StatusOr<bool> Reached(const Mark& mark) = 0;

  virtual absl::Status Upload(ConstMatrixView host, MatrixView device) = 0;
  virtual absl::Status Download(ConstMatrixView device, MatrixView host) = 0;
};

}  // namespace precondor

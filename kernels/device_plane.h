// SPDX-License-Identifier: Apache-2.0
// The memory of one CUDA device as a kind of shared memory, with the caller's streams and the way to host memory.
// Each process copies on a stream of the plane's own. Neither process waits for the other on a stream: a process tells
// its peer of a payload only after it has waited for that payload, so that a peer that dies leaves no stream behind
// that waits forever.
//
// Threads: all calls from any thread, several at once. Views are f32, row-major, on the plane's device. Every call
// waits until the device has done what it asks for. Errors: Internal for the device's faults, ResourceExhausted for
// memory.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/matrix_view.h"
#include "kernels/region_memory.h"

namespace precondor {

class DevicePlane : public RegionMemory {
 public:
  // A moment in the work of a stream.
  class Mark {
   public:
    virtual ~Mark() = default;
  };

  RegionKind kind() const final { return RegionKind::kCuda; }

  // What the caller has put on `stream`, a cudaStream_t of this device (null: the default stream), up to now. Does not
  // wait. The mark must not outlive the plane.
  virtual absl::StatusOr<std::unique_ptr<Mark>> Record(void* stream) = 0;
  // Whether the device has come there. Does not wait: a caller's stream may never come.
  virtual absl::StatusOr<bool> Reached(const Mark& mark) = 0;

  virtual absl::Status Upload(ConstMatrixView host, MatrixView device) = 0;
  virtual absl::Status Download(ConstMatrixView device, MatrixView host) = 0;
};

}  // namespace precondor

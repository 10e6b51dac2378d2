// SPDX-License-Identifier: Apache-2.0
// The CUDA backend. It computes on one device, on one stream, in the order of the calls; long copies have streams of
// their own (kernels/cuda/staging.h). Large dense products use cuBLAS in f32 (bf16 or TF32 on request).
// Eigendecompositions and large inverses use cuSOLVER in f64. The rest are the kernels of kernels/cuda/*.cu.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/device_plane.h"

namespace precondor {

struct CudaBackendOptions {
  int device = 0;  // CUDA device index
  // Limit in bytes on matrices and scratch that exist at the same time. The backend lowers it to the device's free
  // memory less a reserve (Device::kReserveBytes).
  int64_t memory_limit_bytes = std::numeric_limits<int64_t>::max();
};

// Creates a backend, which is as thread-safe as Backend says. Returns InvalidArgument if memory_limit_bytes is not
// positive, Unavailable if a device does not exist, and ResourceExhausted if no more than the reserve is free. Results
// agree with the CPU backend's within the tolerances of the conformance suites, but not bitwise.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options);

// Creates a DevicePlane, by CUDA IPC, on CUDA device `device`. Returns Unavailable if the device does not exist or is
// too old. The first Upload or Download allocates 32 MiB of pinned host memory. No call changes the caller's current
// device, unless the process has no context on that one.
absl::StatusOr<std::unique_ptr<DevicePlane>> MakeCudaPlane(int device);

}  // namespace precondor

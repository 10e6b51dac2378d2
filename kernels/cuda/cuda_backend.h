// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: one device, everything on one stream in the order of the calls, products through cuBLAS in f32
// (bf16 on request), decompositions through cuSOLVER in f64, the rest in kernels of its own (kernels/cuda/*.cu).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/backend.h"

namespace precondor {

struct CudaBackendOptions {
  int device = 0;  // as CUDA counts
  // Of live matrices and scratch; the limit is at most what the device has free, less a reserve
  // (Device::kReserveBytes).
  int64_t memory_limit_bytes = std::numeric_limits<int64_t>::max();
  // Devices of this process whose collectives with this one may reach into its memory, as NCCL's do where one device
  // can reach another; what these want for themselves is then left out of the limit.
  std::vector<int> peers = {};
};

// The number of devices that this process can use, or why there are none: Unavailable, with CUDA's reason.
absl::StatusOr<int> CountCudaDevices();

// Thread-safe as Backend says. Unavailable when there is no such device. Numbers agree with the CPU backend's within
// the conformance suite's tolerances, not to the bit.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options);

}  // namespace precondor

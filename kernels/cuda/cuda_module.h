// SPDX-License-Identifier: Apache-2.0
// The CUDA backend for programs that also run where CUDA is not: it lies in a library of its own, libprecondor-cuda.so,
// which is loaded when it is asked for (docs/adr/0008-cuda-module.md). Loading it and CUDA's libraries takes a process
// about 190 MB and .4 s, which a process without a GPU does not pay.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/device_plane.h"

namespace precondor {

// OK where NVIDIA's driver is installed; Unavailable, with the reason, where it is not. Loads nothing of CUDA's.
absl::Status FindCudaDriver();

// MakeCudaBackend out of the library, which is looked for as any is: the program's RUNPATH, LD_LIBRARY_PATH.
// Unavailable when it, or a device, is missing; FailedPrecondition when it belongs to another version. Thread-safe.
absl::StatusOr<std::unique_ptr<Backend>> LoadCudaBackend(const CudaBackendOptions& options);
// MakeCudaPlane out of the same library, with the same errors.
absl::StatusOr<std::unique_ptr<DevicePlane>> LoadCudaPlane(int device);

// CountCudaDevices out of the library; the same errors.
absl::StatusOr<int> CountLoadedCudaDevices();

}  // namespace precondor

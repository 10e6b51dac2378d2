// SPDX-License-Identifier: Apache-2.0
// Loads the CUDA backend from the library libprecondor-cuda.so at run time, so that the same program also runs on
// machines without CUDA (docs/develop/adr/0008-cuda-module.md). Loading it and the libraries of CUDA costs a process
// about 190 MB and 0.4 s. A process without a GPU does not pay this.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/device_plane.h"

namespace precondor {

// The table of functions that libprecondor-cuda.so exports. The loader checks that `version` is its own.
struct CudaModuleEntry {
  const char* version;
  absl::StatusOr<std::unique_ptr<Backend>> (*make)(const CudaBackendOptions&);
  absl::StatusOr<std::unique_ptr<DevicePlane>> (*make_plane)(int device);
};

constexpr char kCudaModuleSymbol[] = "precondor_cuda_module";

// Returns OK if NVIDIA's driver is installed, and Unavailable with the reason otherwise. Opens and closes the driver's
// library; loads no other library of CUDA.
absl::Status FindCudaDriver();

// Calls MakeCudaBackend in the library, which the dynamic loader finds by the program's RUNPATH or LD_LIBRARY_PATH.
// Returns Unavailable if the library or a device is missing, FailedPrecondition if the library is of another version,
// and otherwise what MakeCudaBackend returns. Thread-safe.
absl::StatusOr<std::unique_ptr<Backend>> LoadCudaBackend(const CudaBackendOptions& options);
// Calls MakeCudaPlane in the library. Errors are those of LoadCudaBackend.
absl::StatusOr<std::unique_ptr<DevicePlane>> LoadCudaPlane(int device);

}  // namespace precondor

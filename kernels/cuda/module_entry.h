// SPDX-License-Identifier: Apache-2.0
// The table of functions that libprecondor-cuda.so exports. The loader checks that `version` is its own.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/device_plane.h"

namespace precondor {

struct CudaModuleEntry {
  const char* version;
  absl::StatusOr<std::unique_ptr<Backend>> (*make)(const CudaBackendOptions&);
  absl::StatusOr<std::unique_ptr<DevicePlane>> (*make_plane)(int device);
};

constexpr char kCudaModuleSymbol[] = "precondor_cuda_module";

}  // namespace precondor

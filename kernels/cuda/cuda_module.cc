// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_module.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/loaded_library.h"
#include "kernels/cuda/module_entry.h"

namespace precondor {
namespace {

absl::StatusOr<const CudaModuleEntry*> Load() {
  return LoadEntry<CudaModuleEntry>("CUDA backend", "libprecondor-cuda.so", kCudaModuleSymbol, PRECONDOR_VERSION);
}

}  // namespace

absl::Status FindCudaDriver() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return absl::UnavailableError(absl::StrCat("no CUDA driver: ", LastLoadError()));
  dlclose(driver);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Backend>> LoadCudaBackend(const CudaBackendOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(const CudaModuleEntry* const entry, Load());
  return entry->make(options);
}

absl::StatusOr<std::unique_ptr<DevicePlane>> LoadCudaPlane(int device) {
  PRECONDOR_ASSIGN_OR_RETURN(const CudaModuleEntry* const entry, Load());
  return entry->make_plane(device);
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_module.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/module_entry.h"

namespace precondor {
namespace {

constexpr char kLibrary[] = "libprecondor-cuda.so";

// dlerror's text, which names the library.
std::string LastError() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

absl::StatusOr<const CudaModuleEntry*> LoadEntry() {
  // Never closed: a backend's code must outlive it, and CUDA is not made to be unloaded.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::UnavailableError(absl::StrCat("no CUDA backend: ", LastError()));
  auto* const entry = static_cast<const CudaModuleEntry*>(dlsym(library, kCudaModuleSymbol));
  if (entry == nullptr || absl::string_view(entry->version) != PRECONDOR_VERSION) {
    return absl::FailedPreconditionError(absl::StrCat(kLibrary, ": expected version ", PRECONDOR_VERSION, ", got ",
                                                      entry == nullptr ? "a library of another make" : entry->version));
  }
  return entry;
}

}  // namespace

absl::Status FindCudaDriver() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return absl::UnavailableError(absl::StrCat("no CUDA driver: ", LastError()));
  dlclose(driver);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Backend>> LoadCudaBackend(const CudaBackendOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(const CudaModuleEntry* const entry, LoadEntry());
  return entry->make(options);
}

absl::StatusOr<int> CountLoadedCudaDevices() {
  PRECONDOR_ASSIGN_OR_RETURN(const CudaModuleEntry* const entry, LoadEntry());
  return entry->count();
}

absl::StatusOr<std::unique_ptr<DevicePlane>> LoadCudaPlane(int device) {
  PRECONDOR_ASSIGN_OR_RETURN(const CudaModuleEntry* const entry, LoadEntry());
  return entry->make_plane(device);
}

}  // namespace precondor

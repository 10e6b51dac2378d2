// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_module.h"

#include <dlfcn.h>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Returns the text of dlerror(), which names the library.
std::string LastLoadError() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

// Loads the library and returns what it exports. The library is never unloaded: its code may be running, and CUDA does
// not support unloading. Thread-safe.
absl::StatusOr<const CudaModuleEntry*> Load() {
  constexpr char kLibrary[] = "libprecondor-cuda.so";
  void* const loaded = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return absl::UnavailableError(absl::StrCat("no CUDA backend: ", LastLoadError()));
  auto* const entry = static_cast<const CudaModuleEntry*>(dlsym(loaded, kCudaModuleSymbol));
  if (entry == nullptr || absl::string_view(entry->version) != PRECONDOR_VERSION) {
    return absl::FailedPreconditionError(absl::StrCat(kLibrary, ": expected version ", PRECONDOR_VERSION, ", got ",
                                                      entry == nullptr ? "a library of another make" : entry->version));
  }
  return entry;
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

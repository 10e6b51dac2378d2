// SPDX-License-Identifier: Apache-2.0
// Loads this project's own shared libraries at run time (docs/develop/adr/0008-cuda-module.md).
#pragma once

#include <dlfcn.h>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Returns the text of dlerror(), which names the library.
inline std::string LastLoadError() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

// Loads `library` and returns the Entry that it exports as `symbol`. The dynamic loader finds the library as usual, by
// the program's RUNPATH or LD_LIBRARY_PATH. Returns Unavailable ("no WHAT: ...") if the library cannot be loaded, and
// FailedPrecondition if it has no such symbol or its Entry::version is not `version`. The library is never unloaded:
// its code may be running, and CUDA does not support unloading. Thread-safe.
template <typename Entry>
absl::StatusOr<const Entry*> LoadEntry(absl::string_view what, const char* library, const char* symbol,
                                       absl::string_view version) {
  void* const loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return absl::UnavailableError(absl::StrCat("no ", what, ": ", LastLoadError()));
  auto* const entry = static_cast<const Entry*>(dlsym(loaded, symbol));
  if (entry == nullptr || absl::string_view(entry->version) != version) {
    return absl::FailedPreconditionError(absl::StrCat(library, ": expected version ", version, ", got ",
                                                      entry == nullptr ? "a library of another make" : entry->version));
  }
  return entry;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Libraries of this project that a program loads when it needs them (docs/adr/0008-cuda-module.md).
#pragma once

#include <dlfcn.h>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace precondor {

// dlerror's text, which names the library.
inline std::string LastLoadError() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

// What `library` shows under `symbol`, an Entry whose `version` has to be `version`. It is looked for as any library
// is: the program's RUNPATH, LD_LIBRARY_PATH. Unavailable, "no WHAT: ...", when it is missing; FailedPrecondition
// when it belongs to another version. Never unloaded: code of it may be running, and CUDA is not made to be.
// Thread-safe.
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

// SPDX-License-Identifier: Apache-2.0
// Method soap: Adam in the eigenbasis of Shampoo's factors, or Shampoo itself, from gradients alone
// (docs/use/methods/soap.md).
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

inline constexpr MethodTraits kSoapTraits = {.name = "soap", .learns_from_gradients = true, .whole_updates = true};

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeSoap(const MethodConfig& config);

}  // namespace precondor

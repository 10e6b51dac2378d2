// SPDX-License-Identifier: Apache-2.0
// Method mkor: rank-1 Kronecker factors with four update rules (docs/use/methods/mkor.md).
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeMkor(const MethodConfig& config);

}  // namespace precondor

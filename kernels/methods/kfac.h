// SPDX-License-Identifier: Apache-2.0
// Method kfac: full Kronecker factors, eigendecomposed or inverted (docs/use/methods/kfac.md).
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeKfac(const MethodConfig& config);

}  // namespace precondor

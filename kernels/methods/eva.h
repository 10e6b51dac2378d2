// SPDX-License-Identifier: Apache-2.0
// Method eva: one running mean vector a side, inverted in closed form (docs/methods/eva.md).
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

// Errors as MakeMethod's.
absl::StatusOr<std::unique_ptr<Method>> MakeEva(const MethodConfig& config);

}  // namespace precondor

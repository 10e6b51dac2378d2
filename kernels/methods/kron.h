// SPDX-License-Identifier: Apache-2.0
// Method kron: PSGD's Kronecker-factored whitening of the gradient, from gradients alone (docs/use/methods/kron.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/kron_block.h"
#include "kernels/methods/method.h"

namespace precondor {

inline constexpr MethodTraits kKronTraits = {.name = "kron", .learns_from_gradients = true, .whole_updates = true};

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeKron(const MethodConfig& config);

}  // namespace precondor

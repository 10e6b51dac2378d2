// SPDX-License-Identifier: Apache-2.0
// Method identity: U = D. No statistics, no state. The baseline, and a plain averaging server.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

inline constexpr MethodTraits kIdentityTraits = {.name = "identity", .worker_factors = WorkerFactors::kReplayed};

// Takes no options. Returns InvalidArgument with the name of an option that is set.
absl::StatusOr<std::unique_ptr<Method>> MakeIdentity(const MethodConfig& config);

}  // namespace precondor

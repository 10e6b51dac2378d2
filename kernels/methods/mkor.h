// SPDX-License-Identifier: Apache-2.0
// Method mkor: rank-1 Kronecker factors with four update rules (docs/use/methods/mkor.md).
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/factor.h"
#include "kernels/methods/method.h"

namespace precondor {

// Returns InvalidArgument with the option, the expected values and the actual value.
absl::StatusOr<MkorConfig> ParseMkorConfig(const MethodConfig& config);

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeMkor(const MethodConfig& config);

// Makes a factor of dimension d in the representation that the configuration chooses, initially J = I. Factors of
// different `phase` do their occasional heavy work (recompression) at different steps, so that no step does it for all.
absl::StatusOr<std::unique_ptr<Factor>> MakeFactor(const MkorConfig& config, int64_t d, uint64_t phase,
                                                   Backend& backend);
// Device bytes of a factor's state, and of the largest scratch of one Prepare with k vectors or one Inverse.
int64_t FactorStateBytes(const MkorConfig& config, int64_t d);
int64_t FactorScratchBytes(const MkorConfig& config, int64_t d, int64_t k);

}  // namespace precondor

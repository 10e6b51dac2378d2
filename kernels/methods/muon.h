// SPDX-License-Identifier: Apache-2.0
// Method muon: the gradients' momentum, made nearly orthogonal by Newton-Schulz iterations (docs/use/methods/muon.md).
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

inline constexpr MethodTraits kMuonTraits = {.name = "muon", .learns_from_gradients = true, .whole_updates = true};

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeMuon(const MethodConfig& config);

}  // namespace precondor

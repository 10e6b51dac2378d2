// SPDX-License-Identifier: Apache-2.0
// Method eva: one running mean vector per side, inverted in closed form (docs/use/methods/eva.md).
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"
#include "kernels/methods/options.h"

namespace precondor {

inline constexpr MethodTraits kEvaTraits = {
    .name = "eva",
    .statistics = StatisticsForm::kVectors,
    .default_statistics = StatisticsKind::kMean,
    .default_scaling = Scaling::kKlClip,
    .worker_factors = WorkerFactors::kReplayed,
};

// Reads every option. The reader keeps the first error.
void ReadEvaOptions(OptionReader& reader);

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeEva(const MethodConfig& config);

}  // namespace precondor

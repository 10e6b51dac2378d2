// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_rules.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/core/resources/reservation.h"

namespace precondor {

Contributions LayerRules::statistics_contributors() const { return Contributions(0, spec->world_size); }

Contributions LayerRules::gradient_contributors() const {
  if (spec->exchange == ExchangeMode::kDelegate) return Contributions(DelegateRank(*spec, layer), 1);
  return Contributions(0, spec->world_size);
}

bool LayerRules::SendsGradient(uint32_t rank) const {
  return spec->exchange != ExchangeMode::kDelegate || rank == static_cast<uint32_t>(DelegateRank(*spec, layer));
}

bool LayerRules::one_answer() const { return GradientContributors(*spec) == 1; }

// In first order only DIRECT sends something; workers that hold factors send at statistic steps alone.
bool LayerRules::has_gaps() const { return spec->exchange != ExchangeMode::kDirect; }

bool LayerRules::ExpectsStatistics(uint64_t step, Mode mode) const {
  return mode == Mode::kSecondOrder && needs_statistics && IsStatisticStep(*spec, step);
}

absl::Status LayerRules::Retired() const {
  return ReasonedStatus(
      absl::StatusCode::kAborted, ErrorReason::kStaleStep,
      absl::StrCat("session \"", spec->name, "\" layer \"", spec->layers[layer].name, "\": the step is retired"));
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/make_factor.h"

#include "kernels/methods/deferred_factor.h"
#include "kernels/methods/dense_factor.h"
#include "kernels/methods/low_rank_factor.h"

namespace precondor {

absl::StatusOr<std::unique_ptr<Factor>> MakeFactor(const MkorConfig& config, int64_t d, uint64_t phase,
                                                   Backend& backend) {
  if (config.UsesLowRank(d)) return LowRankFactor::Make(config, d, phase, backend);
  if (config.UsesDeferred()) return DeferredFactor::Make(config, d, backend);
  return DenseFactor::Make(config, d, backend);
}

int64_t FactorStateBytes(const MkorConfig& config, int64_t d) {
  if (config.UsesLowRank(d)) return LowRankFactor::StateBytes(config, d);
  return config.UsesDeferred() ? DeferredFactor::StateBytes(config, d) : DenseFactor::StateBytes(d);
}

int64_t FactorScratchBytes(const MkorConfig& config, int64_t d, int64_t k) {
  if (config.UsesLowRank(d)) return LowRankFactor::ScratchBytes(config, d, k);
  return config.UsesDeferred() ? DeferredFactor::ScratchBytes(config, d, k) : DenseFactor::ScratchBytes(d, k);
}

}  // namespace precondor

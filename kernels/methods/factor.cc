// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/factor.h"

#include "kernels/methods/dense_factor.h"
#include "kernels/methods/low_rank_factor.h"

namespace precondor {

absl::StatusOr<std::unique_ptr<Factor>> MakeFactor(const MkorConfig& config, int64_t d, uint64_t phase,
                                                   Backend& backend) {
  return config.UsesLowRank(d) ? LowRankFactor::Make(config, d, phase, backend) : DenseFactor::Make(config, d, backend);
}

int64_t FactorStateBytes(const MkorConfig& config, int64_t d) {
  return config.UsesLowRank(d) ? LowRankFactor::StateBytes(config, d) : DenseFactor::StateBytes(config, d);
}

int64_t FactorScratchBytes(const MkorConfig& config, int64_t d, int64_t k) {
  return config.UsesLowRank(d) ? LowRankFactor::ScratchBytes(config, d, k) : DenseFactor::ScratchBytes(config, d, k);
}

}  // namespace precondor

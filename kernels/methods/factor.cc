// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/factor.h"

#include "kernels/base/status_macros.h"

namespace precondor {

bool MkorConfig::UsesLowRank(int64_t d) const {
  if (representation == Representation::kDense) return false;
  return representation == Representation::kLowRank || 2 * rank < 0.8 * static_cast<double>(d);
}

absl::StatusOr<MkorConfig> ParseMkorConfig(const MethodConfig& config) {
  OptionReader reader(config);
  MkorConfig out = ReadMkorConfig(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  if (out.storage == SymmetricStorage::kF16 &&
      (out.rule == UpdateRule::kExactDamped || out.rule == UpdateRule::kPublished)) {
    return absl::InvalidArgumentError(
        "method mkor: option storage: expected F32 with the rules EXACT_DAMPED and PUBLISHED, got F16");
  }
  return out;
}

}  // namespace precondor

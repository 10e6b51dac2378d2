// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/mkor_config.h"

#include <array>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

bool MkorConfig::UsesLowRank(int64_t d) const {
  if (representation == Representation::kDense) return false;
  return representation == Representation::kLowRank || 2 * rank < 0.8 * static_cast<double>(d);
}

MkorConfig ReadMkorConfig(OptionReader& reader) {
  constexpr double kHuge = 1e9;
  MkorConfig out;
  out.rule = static_cast<UpdateRule>(reader.Choice("rule", 0, {"EXACT_DAMPED", "REFERENCE", "BLEND", "PUBLISHED"}));
  out.representation = static_cast<Representation>(reader.Choice("representation", 0, {"AUTO", "DENSE", "LOW_RANK"}));
  out.storage = static_cast<SymmetricStorage>(reader.Choice("storage", 0, {"F32", "F16"}));
  constexpr std::array<ProductPrecision, 3> kPrecisions = {ProductPrecision::kF32, ProductPrecision::kBf16,
                                                           ProductPrecision::kTf32};
  out.products = kPrecisions[static_cast<size_t>(reader.Choice("products", 0, {"F32", "BF16", "TF32"}))];
  out.rank = reader.Integer("rank", out.rank, 1, 1024);
  out.gamma = reader.OpenNumber("gamma", out.gamma, 0, 1);
  out.damping = reader.Number("damping", out.damping, 1e-3, 1e6);
  out.scaling = ReadScaling(reader, kMkorTraits.default_scaling);
  out.scaling.separate_bias = out.rule == UpdateRule::kReference;
  out.clip = reader.OpenNumber("clip", out.clip, 0, kHuge);
  out.zeta = reader.OpenNumber("zeta", out.zeta, 0, 1);
  out.norm_threshold = reader.OpenNumber("norm_threshold", out.norm_threshold, 0, kHuge);
  out.max_factor_dim = reader.Integer("max_factor_dim", out.max_factor_dim, 1, kMaxDimension);
  return out;
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

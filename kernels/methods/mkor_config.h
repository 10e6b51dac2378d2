// SPDX-License-Identifier: Apache-2.0
// Options of method mkor; docs/use/methods/mkor.md has the formulas.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "kernels/base/symmetric_tiles.h"
#include "kernels/methods/method.h"
#include "kernels/methods/options.h"
#include "kernels/methods/scaling.h"

namespace precondor {

inline constexpr MethodTraits kMkorTraits = {
    .name = "mkor",
    .statistics = StatisticsForm::kVectors,
    .default_scaling = Scaling::kNormRescale,
    .worker_factors = WorkerFactors::kReplayed,
};

enum class UpdateRule : uint8_t { kExactDamped, kReference, kBlend, kPublished };
enum class Representation : uint8_t { kAuto, kDense, kLowRank };

struct MkorConfig {
  UpdateRule rule = UpdateRule::kExactDamped;
  Representation representation = Representation::kAuto;
  SymmetricStorage storage = SymmetricStorage::kF32;   // of dense factors if UsesDeferred()
  ProductPrecision products = ProductPrecision::kF32;  // that precondition a gradient
  int64_t rank = 64;                                   // columns kept per factor in the low-rank form
  double gamma = 0.95;                                 // decay of one statistic step
  double damping = 1.0;                                // lambda, relative to the mean eigenvalue
  ScalingPolicy scaling;
  double clip = 100;              // REFERENCE: clamp of the vectors' elements; PUBLISHED: cap of max |J|
  double zeta = 0.95;             // PUBLISHED: weight of J in the blend with I
  double norm_threshold = 10;     // PUBLISHED: blend when max |J| exceeds it
  int64_t max_factor_dim = 8192;  // longer sides are split block-diagonally

  // Returns true if a factor of dimension d is kept in low-rank form.
  bool UsesLowRank(int64_t d) const;
  // Returns true if a dense factor's updates are a few rank-1 terms, which can be deferred.
  bool UsesDeferred() const { return rule != UpdateRule::kExactDamped; }
  // Returns the number of vectors, of k, that one Sherman-Morrison step uses. BLEND bounds their norms, so one step can
  // use all. REFERENCE does not, and only steps of one vector lose nothing to rounding however long the vectors are.
  int64_t ShermanMorrisonBlock(int64_t k) const { return rule == UpdateRule::kBlend ? k : 1; }
};

// Reads every option. The reader keeps the first error; the caller calls its Finish.
inline MkorConfig ReadMkorConfig(OptionReader& reader) {
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
// Returns InvalidArgument with the option, the expected values and the actual value.
absl::StatusOr<MkorConfig> ParseMkorConfig(const MethodConfig& config);

}  // namespace precondor

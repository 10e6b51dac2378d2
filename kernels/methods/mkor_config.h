// SPDX-License-Identifier: Apache-2.0
// Options of method mkor; docs/use/methods/mkor.md has the formulas.
#pragma once

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
MkorConfig ReadMkorConfig(OptionReader& reader);
// Returns InvalidArgument with the option, the expected values and the actual value.
absl::StatusOr<MkorConfig> ParseMkorConfig(const MethodConfig& config);

}  // namespace precondor

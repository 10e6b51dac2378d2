// SPDX-License-Identifier: Apache-2.0
// Options of method mkor; docs/methods/mkor.md has the formulas.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "kernels/base/symmetric_tiles.h"
#include "kernels/methods/options.h"
#include "kernels/methods/scaling.h"

namespace precondor {

enum class UpdateRule : uint8_t { kExactDamped, kReference, kBlend, kPublished };
enum class Representation : uint8_t { kAuto, kDense, kLowRank };

struct MkorConfig {
  UpdateRule rule = UpdateRule::kExactDamped;
  Representation representation = Representation::kAuto;
  SymmetricStorage storage = SymmetricStorage::kF32;   // of dense factors that UsesDeferred
  ProductPrecision products = ProductPrecision::kF32;  // of preconditions with two dense sides
  int64_t rank = 64;                                   // columns kept per factor in the low-rank form
  double gamma = 0.95;                                 // decay of one statistic step
  double damping = 1.0;                                // lambda, relative to the mean eigenvalue
  ScalingPolicy scaling;
  double clip = 100;              // REFERENCE: clamp of the vectors' elements; PUBLISHED: cap of max |J|
  double zeta = 0.95;             // PUBLISHED: weight of J in the blend with I
  double norm_threshold = 10;     // PUBLISHED: blend when max |J| exceeds it
  int64_t max_factor_dim = 8192;  // longer sides are split block-diagonally
  int64_t split_dim = 0;  // dense factors from this dimension on lie over several devices, if there are; 0: none

  // True when a factor of dimension d is kept in the low-rank form.
  bool UsesLowRank(int64_t d) const;
  // True when it is dense and lies over several devices where a process has them.
  bool Splits(int64_t d) const { return split_dim > 0 && d >= split_dim && !UsesLowRank(d); }
  // True when a dense factor's updates are a few rank-1 terms, which may wait.
  bool UsesDeferred() const { return rule != UpdateRule::kExactDamped; }
  // Vectors that Sherman-Morrison takes in at once, of k: BLEND bounds their length, so that all may come together;
  // REFERENCE does not, and only one by one loses nothing to rounding however long they are.
  int64_t ShermanMorrisonBlock(int64_t k) const { return rule == UpdateRule::kBlend ? k : 1; }
};

// Reads every option. The reader keeps the first error; the caller calls its Finish.
MkorConfig ReadMkorConfig(OptionReader& reader);
// InvalidArgument names the option, what was expected and what came.
absl::StatusOr<MkorConfig> ParseMkorConfig(const MethodConfig& config);

}  // namespace precondor

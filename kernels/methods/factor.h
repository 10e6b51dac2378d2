// SPDX-License-Identifier: Apache-2.0
// One (inverse) Kronecker factor of method mkor, and the options by which it is updated.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/method_inputs.h"
#include "kernels/methods/options.h"
#include "kernels/methods/scaling.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

inline constexpr MethodTraits kMkorTraits = {
    .name = "mkor",
    .statistics = StatisticsForm::kVectors,
    .default_scaling = Scaling::kNormRescale,
    .worker_factors = WorkerFactors::kReplayed,
};

enum class UpdateRule : uint8_t { kExactDamped, kReference, kBlend, kPublished };
enum class Representation : uint8_t { kAuto, kDense, kLowRank };

// docs/use/methods/mkor.md has the formulas.
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
  bool UsesLowRank(int64_t d) const {
    if (representation == Representation::kDense) return false;
    return representation == Representation::kLowRank || 2 * rank < 0.8 * static_cast<double>(d);
  }
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
// J = c * unit, as Precondition uses it. The scalar c is separate because one scaling policy needs it and another
// cancels it, and because 1/eigenvalue can leave the range of f32. `unit` is dense, or of low-rank form with its own c
// equal to 1.
struct FactorInverse {
  double c = 1.0;
  bool dense = false;
  SymmetricForm form;       // if dense
  LowRankInverse low_rank;  // otherwise
  DeviceMatrix owned;       // memory of low_rank.core if the factor does not keep it
};

// One inverse factor: the seam between mkor's update rules and its representations. One thread at a time. Updates have
// phases, so that both factors of a layer change or neither does: Prepare and then Conclude compute the next J without
// changing J, and may fail. Commit adopts it and cannot fail.
class Factor {
 public:
  virtual ~Factor() = default;
  // Starts an update with vectors [k, d] on the device, all finite. squares: |v|^2 of each, or empty if the caller has
  // not computed them.
  virtual absl::Status Prepare(ConstMatrixView vectors, absl::Span<const double> squares) = 0;
  absl::Status Prepare(ConstMatrixView vectors) { return Prepare(vectors, {}); }
  // Returns whether a Prepare of k vectors with their squares may run in a Backend::Batch, which must end before
  // Conclude.
  virtual bool PreparesInBatch(int64_t) const { return false; }
  // Checks results that Prepare has requested from the device. Call it after each Prepare that is to be committed.
  virtual absl::Status Conclude() { return absl::OkStatus(); }
  virtual void Commit() = 0;
  // Frees the results of a Prepare that is not committed, in whichever phase that is.
  virtual void Abandon() = 0;
  // Writes everything that the next Prepare and Inverse depend on.
  virtual absl::Status Save(StateWriter& out) const = 0;
  // A Prepare without Conclude: stages the state that Save wrote for a factor of the same kind and dimension. Errors:
  // those of StateReader.
  virtual absl::Status PrepareLoad(StateReader& in) = 0;
  // Returns J. Its views stay valid until the next Prepare or Inverse. If it runs in a Backend::Batch whose Finish
  // fails, the result is invalid, and the caller must call ForgetInverse.
  virtual absl::StatusOr<FactorInverse> Inverse() const = 0;
  virtual void ForgetInverse() {}
  virtual bool low_rank() const = 0;
  virtual int64_t rank() const = 0;    // columns in use; 0 if dense
  virtual double damping() const = 0;  // in units of the factor's eigenvalues; 0 for rules without damping
  virtual int64_t bytes() const = 0;
};

// Returns the weight of u u' under PUBLISHED, with u = J v, x = v'u and the plus sign of the paper
// (docs/use/methods/mkor.md).
inline double PublishedWeight(double gamma, double x) {
  return (1.0 - gamma) / (gamma * gamma * (1.0 + gamma * (1.0 - gamma) * (x > 0 ? x : 0.0)));
}

}  // namespace precondor

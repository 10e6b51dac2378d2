// SPDX-License-Identifier: Apache-2.0
// One (inverse) Kronecker factor: the seam between mkor's update rules and its two representations.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/mkor_config.h"
#include "kernels/methods/state_codec.h"
#include "kernels/methods/statistics.h"

namespace precondor {

class SplitFactor;  // kernels/methods/split_factor.h

// J = c * unit, as Precondition uses it: the scalar apart, because one policy needs it and another cancels it, and
// because 1/eigenvalue can leave the range of f32. `unit` is dense, or of the low-rank form with its c == 1.
struct FactorInverse {
  double c = 1.0;
  bool dense = false;
  SymmetricForm form;                  // when dense on this device
  const SplitFactor* split = nullptr;  // when dense on several
  LowRankInverse low_rank;             // otherwise
  DeviceMatrix owned;                  // what low_rank.core shows, where the factor does not keep it
};

// One thread at a time. In phases, so that both factors of a layer change or neither: Prepare and then Conclude compute
// aside and may fail and leave J as it was, Commit adopts what they made and cannot fail.
class Factor {
 public:
  virtual ~Factor() = default;
  // vectors [k, d] on the device, all finite; squares: |v|^2 of each, or empty where the caller has not computed them.
  virtual absl::Status Prepare(ConstMatrixView vectors, absl::Span<const double> squares) = 0;
  absl::Status Prepare(ConstMatrixView vectors) { return Prepare(vectors, {}); }
  // Whether a Prepare of k vectors with their squares may run in a Backend::Batch, which ends before Conclude.
  virtual bool PreparesInBatch(int64_t) const { return false; }
  // Looks at what the device has said to Prepare. After each Prepare that is to be committed.
  virtual absl::Status Conclude() { return absl::OkStatus(); }
  virtual void Commit() = 0;
  // Frees what a Prepare without a Commit has made, in whichever phase it is.
  virtual void Abandon() = 0;
  // All that the next Prepare and Inverse depend on.
  virtual absl::Status Save(StateWriter& out) const = 0;
  // A Prepare, with nothing to conclude, that stages what Save wrote for a factor of the same kind and dimension.
  // Errors: those of StateReader.
  virtual absl::Status PrepareLoad(StateReader& in) = 0;
  // Views stay valid until the next Prepare or Inverse. In a Backend::Batch whose Finish fails there is none, and the
  // factor must be told.
  virtual absl::StatusOr<FactorInverse> Inverse() const = 0;
  virtual void ForgetInverse() {}
  virtual bool low_rank() const = 0;
  virtual int64_t rank() const = 0;    // columns in use; 0 when dense
  virtual double damping() const = 0;  // in units of the factor's eigenvalues; 0 for rules without
  virtual int64_t bytes() const = 0;
};

// PUBLISHED: the weight of u u' with u = J v, x = v'u; the plus sign of the paper (docs/methods/mkor.md).
inline double PublishedWeight(double gamma, double x) {
  return (1.0 - gamma) / (gamma * gamma * (1.0 + gamma * (1.0 - gamma) * (x > 0 ? x : 0.0)));
}

// A factor of dimension d in the representation that the configuration chooses; J = I at first. Factors of different
// `phase` do their occasional heavy work (recompression) at different steps, so that no step has to do it for all.
absl::StatusOr<std::unique_ptr<Factor>> MakeFactor(const MkorConfig& config, int64_t d, uint64_t phase,
                                                   Backend& backend);
// Device bytes of its state, and of the largest scratch of one Prepare with k vectors or one Inverse.
int64_t FactorStateBytes(const MkorConfig& config, int64_t d);
int64_t FactorScratchBytes(const MkorConfig& config, int64_t d, int64_t k);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// One (inverse) Kronecker factor: the seam between mkor's update rules and its two representations.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/mkor_config.h"
#include "kernels/methods/state_codec.h"
#include "kernels/methods/statistics.h"

namespace precondor {

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

// One inverse factor. One thread at a time. Updates have phases, so that both factors of a layer change or neither
// does: Prepare and then Conclude compute the next J without changing J, and may fail. Commit adopts it and cannot
// fail.
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

// SPDX-License-Identifier: Apache-2.0
// One side of method kfac: the running second moment. A change is first prepared and then committed or abandoned, so
// that both sides of a layer change together.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

// The running second moment of one side. One thread at a time.
class KfacSide {
 public:
  // Makes a side whose second moment is I. `backend` must outlive the side.
  static absl::StatusOr<KfacSide> Make(int64_t d, Backend& backend);
  static int64_t PackedElements(int64_t d) { return d * (d + 1) / 2; }
  // Exact. A prepared change takes as much again, and a work matrix [d, d] while it is computed.
  static int64_t StateBytes(int64_t d) { return PackedElements(d) * static_cast<int64_t>(sizeof(float)); }

  // Prepares F = keep F + add S. S is the second moment of `vectors` [k, d] or, if there are none, the packed
  // `covariance`. Returns InvalidArgument if F would not fit f32.
  absl::Status PrepareFactor(ConstMatrixView vectors, ConstMatrixView covariance, double keep, double add);
  // Prepares F = I.
  absl::Status PrepareReset();
  void Commit();
  void Abandon() { next_factor_ = DeviceMatrix(); }

  // Writes F.
  absl::Status Save(StateWriter& out) const { return out.Matrix(*backend_, factor_.view()); }
  absl::Status PrepareLoad(StateReader& in);

  // Returns the packed prepared F, or the packed F if none is prepared.
  ConstMatrixView factor() const { return next_factor_.empty() ? factor_.view() : next_factor_.view(); }

 private:
  KfacSide(int64_t d, Backend& backend) : d_(d), backend_(&backend) {}

  int64_t d_;
  Backend* backend_;
  DeviceMatrix factor_;  // F, packed
  DeviceMatrix next_factor_;
};

}  // namespace precondor

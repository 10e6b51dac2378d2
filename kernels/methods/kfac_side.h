// SPDX-License-Identifier: Apache-2.0
// One side of method kfac: the running second moment and what was made of it last. Changes are prepared aside and then
// taken over or dropped, so that both sides of a layer change together.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/kfac_config.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

// One thread at a time.
class KfacSide {
 public:
  // The second moment is I and nothing is decomposed. `backend` outlives the side.
  static absl::StatusOr<KfacSide> Make(KfacForm form, int64_t d, Backend& backend);
  // Exact, and an upper bound of what is allocated beside it at any time: what is prepared, and a work matrix.
  static int64_t StateBytes(int64_t d);
  static int64_t ScratchBytes(int64_t d);

  // Prepares F = keep F + add S, S the second moment of the given vectors [k, d] or, where there are none, the packed
  // covariance. InvalidArgument when F would not fit f32.
  absl::Status PrepareFactor(ConstMatrixView vectors, ConstMatrixView covariance, double keep, double add);
  // Prepares F = I.
  absl::Status PrepareReset();
  // Prepares the decomposition of the prepared F, or of F where none is. EIGEN: eigenvalues, those below 0 set to 0,
  // with eigenvectors. INVERSE: (F + damping I)^-1 by Cholesky, and where that says that F + damping I is not positive
  // definite by an eigendecomposition with eigenvalues below 0 set to 0. FailedPrecondition when there is none.
  absl::Status PrepareDecomposition(double damping);
  // The mean of the diagonal of the prepared F, or of F where none is.
  absl::StatusOr<double> MeanDiagonal();

  void Commit();
  void Abandon();
  // Drops the prepared decomposition and keeps the prepared factor.
  void AbandonDecomposition();

  absl::Status Save(StateWriter& out) const;
  absl::Status PrepareLoad(StateReader& in);

  int64_t d() const { return d_; }
  int64_t bytes() const;
  // EIGEN: eigenvectors as rows, ascending. INVERSE: scale() (F + damping I)^-1.
  ConstMatrixView basis() const { return basis_.view(); }
  const std::vector<double>& values() const { return numbers_.values; }
  double scale() const { return numbers_.scale; }
  const std::vector<double>& next_values() const { return next_numbers_.values; }

 private:
  // What belongs to a basis.
  struct Numbers {
    std::vector<double> values;
    double scale = 1.0;
  };

  KfacSide(KfacForm form, int64_t d, Backend& backend) : form_(form), d_(d), backend_(&backend) {}
  ConstMatrixView CurrentFactor() const { return next_factor_.empty() ? factor_.view() : next_factor_.view(); }
  int64_t packed() const { return d_ * (d_ + 1) / 2; }
  absl::Status PrepareEigen();
  absl::Status PrepareInverse(double damping);
  absl::Status InvertByEigenvalues(double floor);

  KfacForm form_;
  int64_t d_;
  Backend* backend_;
  DeviceMatrix factor_;  // F, packed
  DeviceMatrix basis_;   // [d, d]
  Numbers numbers_;
  DeviceMatrix next_factor_;
  DeviceMatrix next_basis_;
  Numbers next_numbers_;
};

}  // namespace precondor

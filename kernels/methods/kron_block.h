// SPDX-License-Identifier: Apache-2.0
// The two factors of one block of a layer's gradient in method kron: P = Q'Q on each side (docs/methods/kron.md).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/kron_config.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

// Q of one side: a square matrix, upper triangular in variant TRIANGULAR, or the diagonal of one.
struct KronSide {
  int64_t size = 0;
  DeviceMatrix matrix;           // empty when diagonal
  std::vector<double> diagonal;  // empty when not
  double smoothness = 0;         // variant PROCRUSTES: the running bound of the gradient's norm

  bool is_diagonal() const { return matrix.empty(); }
};

// One thread at a time; a block that is not updated may be shared.
class KronBlock {
 public:
  // Q_L x Q_R = init_scale I.
  static absl::StatusOr<KronBlock> Make(const KronConfig& config, int64_t rows, int64_t cols, bool diagonal_rows,
                                        bool diagonal_cols, Backend& backend);
  // A copy of its own.
  absl::StatusOr<KronBlock> Clone(Backend& backend) const;

  // x = Q_L' Q_L x Q_R' Q_R.
  absl::Status Apply(const KronConfig& config, Backend& backend, MatrixView x) const;

  // Makes both sides' max |q_ij| equal, their product as it was.
  absl::Status Balance(Backend& backend);
  // One step of both factors towards whitening g, whose damping is in it already; v is the probe. Both are used up. An
  // error leaves the block unspecified. Errors: FailedPrecondition where something is not finite; the backend's.
  absl::Status Update(const KronConfig& config, Backend& backend, MatrixView g, MatrixView v);

  absl::Status Save(Backend& backend, StateWriter& out) const;
  absl::Status Load(Backend& backend, StateReader& in);
  int64_t bytes() const { return (rows_.matrix.view().size() + cols_.matrix.view().size()) * kElementBytes; }

  // Of one block, in elements.
  static int64_t StateElements(int64_t rows, int64_t cols, bool diagonal_rows, bool diagonal_cols);
  // What Apply and Update allocate at most, the block itself and their arguments not counted.
  static int64_t ScratchElements(const KronConfig& config, int64_t rows, int64_t cols, bool diagonal_rows,
                                 bool diagonal_cols);

 private:
  static constexpr int64_t kElementBytes = sizeof(float);
  KronBlock(KronSide rows, KronSide cols) : rows_(std::move(rows)), cols_(std::move(cols)) {}
  absl::Status UpdateTriangular(const KronConfig& config, Backend& backend, MatrixView g, MatrixView v);
  absl::Status UpdateProcrustes(const KronConfig& config, Backend& backend, MatrixView g);

  KronSide rows_;  // Q_L
  KronSide cols_;  // Q_R
};

}  // namespace precondor

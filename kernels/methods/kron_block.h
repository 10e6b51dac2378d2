// SPDX-License-Identifier: Apache-2.0
// The factors of one block of a layer's gradient in method kron: P = Q'Q along each dimension (docs/methods/kron.md).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/kron_config.h"
#include "kernels/methods/state_codec.h"
#include "kernels/methods/tensor.h"

namespace precondor {

// Q of one side: a square matrix, upper triangular in variant TRIANGULAR, or the diagonal of one.
struct KronSide {
  int64_t size = 0;
  DeviceMatrix matrix;           // empty when diagonal
  std::vector<double> diagonal;  // empty when not
  double smoothness = 0;         // variant PROCRUSTES: the running bound of the gradient's norm

  bool is_diagonal() const { return matrix.empty(); }
};

// What a block's factors are like, a side for each dimension of the tensor.
struct KronSides {
  std::vector<int64_t> sizes;
  std::vector<bool> diagonal;

  int64_t elements() const { return ElementsOf(sizes); }
};

// One thread at a time; a block that is not updated may be shared. A tensor x of the block's is [sizes[0], sizes[1]] of
// any stride where there are two sides; otherwise contiguous, and of any number of rows.
class KronBlock {
 public:
  // The Kronecker product of all Q's = init_scale I.
  static absl::StatusOr<KronBlock> Make(const KronConfig& config, const KronSides& sides, Backend& backend);
  // A copy of its own.
  absl::StatusOr<KronBlock> Clone(Backend& backend) const;

  // x = Q'Q along each of its modes; of two sides: Q_L' Q_L x Q_R' Q_R.
  absl::Status Apply(const KronConfig& config, Backend& backend, MatrixView x) const;

  // Makes all sides' max |q_ij| equal, their product as it was.
  absl::Status Balance(Backend& backend);
  // One step of all factors towards whitening g, whose damping is in it already; v is the probe. Both are used up. An
  // error leaves the block unspecified. Errors: FailedPrecondition where something is not finite; the backend's.
  absl::Status Update(const KronConfig& config, Backend& backend, MatrixView g, MatrixView v);

  absl::Status Save(Backend& backend, StateWriter& out) const;
  absl::Status Load(Backend& backend, StateReader& in);
  int64_t bytes() const { return StateElements(sides_) * kElementBytes; }

  // Of one block, in elements.
  static int64_t StateElements(const KronSides& sides);
  // What Apply and Update allocate at most, the block itself and their arguments not counted.
  static int64_t ScratchElements(const KronConfig& config, const KronSides& sides);

 private:
  static constexpr int64_t kElementBytes = sizeof(float);
  explicit KronBlock(KronSides sides) : sides_(std::move(sides)) {}
  absl::StatusOr<ModeMatrix> Mode(size_t mode, MatrixView x, Backend& backend) const {
    return ModeMatrix::Of(sides_.sizes, mode, x, backend);
  }
  absl::Status UpdateTriangular(const KronConfig& config, Backend& backend, MatrixView g, MatrixView v);
  absl::Status UpdateProcrustes(const KronConfig& config, Backend& backend, MatrixView g);

  KronSides sides_;
  std::vector<KronSide> factors_;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The factors of one block of a layer's gradient in method kron: P = Q'Q along each dimension
// (docs/use/methods/kron.md).
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

// Q of one side: a square matrix, upper triangular in variant TRIANGULAR, or a diagonal.
struct KronSide {
  int64_t size = 0;
  DeviceMatrix matrix;           // empty if diagonal
  std::vector<double> diagonal;  // empty if not diagonal
  double smoothness = 0;         // variant PROCRUSTES: running bound of the gradient's norm

  bool is_diagonal() const { return matrix.empty(); }
};

// Sizes and kinds of a block's factors, a side for each dimension of the tensor.
struct KronSides {
  std::vector<int64_t> sizes;
  std::vector<bool> diagonal;

  int64_t elements() const { return ElementsOf(sizes); }
};

// The factors of one block. One thread at a time; several threads may use a block that is not updated. A tensor x of
// the block is [sizes[0], sizes[1]] of any stride if there are two sides; otherwise it is contiguous, with any number
// of rows.
class KronBlock {
 public:
  // Makes a block whose Kronecker product of all Q's is init_scale I.
  static absl::StatusOr<KronBlock> Make(const KronConfig& config, const KronSides& sides, Backend& backend);
  // Returns a copy that shares no memory with this block.
  absl::StatusOr<KronBlock> Clone(Backend& backend) const;

  // x = Q'Q x along each mode; for two sides: Q_L' Q_L x Q_R' Q_R.
  absl::Status Apply(const KronConfig& config, Backend& backend, MatrixView x) const;

  // Scales the sides so that their max |q_ij| are equal and the product of the sides is unchanged.
  absl::Status Balance(Backend& backend);
  // Moves all factors by one step towards whitening g, which includes its damping; v is the probe. Overwrites g and v.
  // After an error the block is unspecified. Errors: FailedPrecondition if a value is not finite; the backend's.
  absl::Status Update(const KronConfig& config, Backend& backend, MatrixView g, MatrixView v);

  absl::Status Save(Backend& backend, StateWriter& out) const;
  absl::Status Load(Backend& backend, StateReader& in);
  int64_t bytes() const { return StateElements(sides_) * kElementBytes; }

  // Elements of one block's state.
  static int64_t StateElements(const KronSides& sides);
  // Upper bound of the elements that Apply and Update allocate, the block itself and their arguments not included.
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

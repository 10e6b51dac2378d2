// SPDX-License-Identifier: Apache-2.0
// The factors of one block of a layer's gradient in method kron, P = Q'Q along each dimension, and the method's options
// (docs/use/methods/kron.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/options.h"
#include "kernels/methods/state_codec.h"
#include "kernels/methods/tensor.h"

namespace precondor {

enum class MemorySaveMode : uint8_t { kNone, kOneDiag, kAllDiag };

struct KronConfig {
  double momentum = 0.9;
  double precondition_lr = 0.1;         // step size of the factors
  double init_scale = 1.0;              // Q_L x Q_R is initially this times I
  double max_update_probability = 1.0;  // p(n) = clip(max exp(-decay (n - flat_steps)), min, max)
  double min_update_probability = 0.03;
  double update_decay = 0.001;
  double update_flat_steps = 500;
  double balance_probability = 0.01;  // probability of balancing at an update
  int64_t max_size_triangular = 8192;
  int64_t min_ndim_triangular = 2;
  double max_skew = 0;  // a side d of a tensor of n elements is diagonal if d^2 > max_skew n; 0: no limit
  MemorySaveMode memory_save_mode = MemorySaveMode::kNone;
  int64_t block_size = 0;  // 0: sides are not split
  DimMerging merging = {};
  double rms_clip = 1.1;
  uint64_t seed = 0;

  // Returns p(n) for the n-th gradient, counted from 1.
  double UpdateProbability(uint64_t n) const;
  std::vector<int64_t> Sides(const LayerSpec& layer) const { return merging.Sides(layer, max_size_triangular); }
  // Returns which of these sides keep only a diagonal. `ndim` is the number of dimensions before merging.
  std::vector<bool> Diagonal(const std::vector<int64_t>& sides, size_t ndim) const;
  // Returns the lengths of the blocks that cover a side: equal, but the first ones may be longer by one. A diagonal
  // side is one block.
  std::vector<int64_t> Blocks(int64_t size, bool diagonal) const;
};

// Reads every option. The reader keeps the first error; the caller calls its Finish.
inline KronConfig ReadKronConfig(OptionReader& reader) {
  constexpr double kHuge = 1e9;
  KronConfig out;
  out.momentum = reader.Number("momentum", out.momentum, 0, 0.9999);
  out.precondition_lr = reader.OpenNumber("precondition_lr", out.precondition_lr, 0, 1);
  out.init_scale = reader.OpenNumber("init_scale", out.init_scale, 0, kHuge);
  out.max_update_probability = reader.Number("max_update_probability", out.max_update_probability, 1e-6, 1);
  out.min_update_probability = reader.Number("min_update_probability",
                                             std::min(out.min_update_probability, out.max_update_probability), 1e-6, 1);
  out.update_decay = reader.Number("update_decay", out.update_decay, 0, 1);
  out.update_flat_steps = reader.Number("update_flat_steps", out.update_flat_steps, 0, kHuge);
  out.balance_probability = reader.Number("balance_probability", out.balance_probability, 0, 1);
  out.max_size_triangular = reader.Integer("max_size_triangular", out.max_size_triangular, 0, kMaxDimension);
  out.memory_save_mode =
      static_cast<MemorySaveMode>(reader.Choice("memory_save_mode", 0, {"NONE", "ONE_DIAG", "ALL_DIAG"}));
  out.block_size = reader.Integer("block_size", out.block_size, 0, kMaxDimension);
  out.min_ndim_triangular = reader.Integer("min_ndim_triangular", out.min_ndim_triangular, 0, kMaxTensorDims + 1);
  out.max_skew = reader.Number("max_skew", out.max_skew, 0, kHuge);
  out.merging = DimMerging::Read(reader);
  out.rms_clip = reader.OpenNumber("rms_clip", out.rms_clip, 0, kHuge);
  out.seed = static_cast<uint64_t>(reader.Integer("seed", 0, 0, std::numeric_limits<int32_t>::max()));
  return out;
}
// Returns InvalidArgument with the option, the expected values and the actual value.
absl::StatusOr<KronConfig> ParseKronConfig(const MethodConfig& config);

// Q of one side: an upper triangular matrix, or a diagonal.
struct KronSide {
  int64_t size = 0;
  DeviceMatrix matrix;           // empty if diagonal
  std::vector<double> diagonal;  // empty if not diagonal

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
  absl::Status Apply(Backend& backend, MatrixView x) const;

  // Scales the sides so that their max |q_ij| are equal and the product of the sides is unchanged.
  absl::Status Balance(Backend& backend);
  // Moves all factors by one step towards whitening g, which includes its damping; v is the probe. Overwrites g and v.
  // After an error the block is unspecified. Errors: FailedPrecondition if a value is not finite; the backend's.
  absl::Status Update(double lr, Backend& backend, MatrixView g, MatrixView v);

  absl::Status Save(Backend& backend, StateWriter& out) const;
  absl::Status Load(Backend& backend, StateReader& in);
  int64_t bytes() const { return StateElements(sides_) * kElementBytes; }

  // Elements of one block's state.
  static int64_t StateElements(const KronSides& sides);
  // Upper bound of the elements that Apply and Update allocate, the block itself and their arguments not included.
  static int64_t ScratchElements(const KronSides& sides);

 private:
  static constexpr int64_t kElementBytes = sizeof(float);
  explicit KronBlock(KronSides sides) : sides_(std::move(sides)) {}
  absl::StatusOr<ModeMatrix> Mode(size_t mode, MatrixView x, Backend& backend) const {
    return ModeMatrix::Of(sides_.sizes, mode, x, backend);
  }

  KronSides sides_;
  std::vector<KronSide> factors_;
};

}  // namespace precondor

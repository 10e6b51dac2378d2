// SPDX-License-Identifier: Apache-2.0
// Options of method kron; docs/methods/kron.md has the formulas.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/options.h"
#include "kernels/methods/tensor.h"

namespace precondor {

enum class KronVariant : uint8_t { kTriangular, kProcrustes };
enum class MemorySaveMode : uint8_t { kNone, kOneDiag, kAllDiag };

struct KronConfig {
  KronVariant variant = KronVariant::kTriangular;
  double momentum = 0.9;
  double precondition_lr = 0.1;         // of the factors
  double init_scale = 1.0;              // Q_L x Q_R begins as this times I
  double max_update_probability = 1.0;  // p(n) = clip(max exp(-decay (n - flat_steps)), min, max)
  double min_update_probability = 0.03;
  double update_decay = 0.001;
  double update_flat_steps = 500;
  double balance_probability = 0.01;  // of an update
  int64_t max_size_triangular = 8192;
  int64_t min_ndim_triangular = 2;
  double max_skew = 0;  // a side d of a tensor of n elements is diagonal where d^2 > max_skew n; 0: none for that
  MemorySaveMode memory_save_mode = MemorySaveMode::kNone;
  int64_t block_size = 0;  // 0: whole sides
  DimMerging merging = {};
  double rms_clip = 1.1;
  uint64_t seed = 0;

  // p(n) of the n-th gradient, from 1.
  double UpdateProbability(uint64_t n) const;
  std::vector<int64_t> Sides(const LayerSpec& layer) const { return merging.Sides(layer, max_size_triangular); }
  // Which of these sides keep their diagonal alone. `ndim` is how many dimensions there were before they were merged.
  std::vector<bool> Diagonal(const std::vector<int64_t>& sides, size_t ndim) const;
  // Lengths of the blocks that cover a side: equal, the first ones longer by one; a diagonal side is not split.
  std::vector<int64_t> Blocks(int64_t size, bool diagonal) const;
};

// Reads every option. The reader keeps the first error; the caller calls its Finish.
KronConfig ReadKronConfig(OptionReader& reader);
// InvalidArgument names the option, what was expected and what came.
absl::StatusOr<KronConfig> ParseKronConfig(const MethodConfig& config);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Options of method kron; docs/methods/kron.md has the formulas.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"

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
  MemorySaveMode memory_save_mode = MemorySaveMode::kNone;
  int64_t block_size = 0;  // 0: whole sides
  double rms_clip = 1.1;
  uint64_t seed = 0;

  // p(n) of the n-th gradient, from 1.
  double UpdateProbability(uint64_t n) const;
  // Whether the side keeps its diagonal alone.
  bool DiagonalRows(int64_t rows, int64_t cols) const;
  bool DiagonalColumns(int64_t rows, int64_t cols) const;
  // Lengths of the blocks that cover a side: equal, the first ones longer by one; a diagonal side is not split.
  std::vector<int64_t> Blocks(int64_t size, bool diagonal) const;
};

// InvalidArgument names the option, what was expected and what came.
absl::StatusOr<KronConfig> ParseKronConfig(const MethodConfig& config);

}  // namespace precondor

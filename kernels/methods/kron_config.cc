// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kron_config.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

double KronConfig::UpdateProbability(uint64_t n) const {
  const double annealed =
      max_update_probability * std::exp(-update_decay * (static_cast<double>(n) - update_flat_steps));
  return std::clamp(annealed, min_update_probability, max_update_probability);
}

std::vector<bool> KronConfig::Diagonal(const std::vector<int64_t>& sides, size_t ndim) const {
  const bool all = memory_save_mode == MemorySaveMode::kAllDiag || static_cast<int64_t>(ndim) < min_ndim_triangular;
  double elements = 1;
  for (const int64_t side : sides) elements *= static_cast<double>(side);
  std::vector<bool> diagonal;
  for (const int64_t side : sides) {
    const double square = static_cast<double>(side) * static_cast<double>(side);
    diagonal.push_back(all || side == 1 || side > max_size_triangular ||
                       (max_skew > 0 && square > max_skew * elements));
  }
  if (memory_save_mode == MemorySaveMode::kOneDiag) {
    // The longest side has the largest factor; among equals the last side counts.
    const auto longest = std::max_element(sides.rbegin(), sides.rend());
    diagonal[sides.rend() - longest - 1] = true;
  }
  return diagonal;
}

std::vector<int64_t> KronConfig::Blocks(int64_t size, bool diagonal) const {
  const int64_t longest = diagonal || block_size == 0 ? size : block_size;
  const int64_t count = (size + longest - 1) / longest;
  std::vector<int64_t> sizes(count, size / count);
  for (int64_t i = 0; i < size % count; ++i) ++sizes[i];
  return sizes;
}

absl::StatusOr<KronConfig> ParseKronConfig(const MethodConfig& config) {
  OptionReader reader(config);
  KronConfig out = ReadKronConfig(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  if (out.min_update_probability > out.max_update_probability) {
    return absl::InvalidArgumentError(absl::StrCat("method kron: option min_update_probability: expected at most ",
                                                   out.max_update_probability, ", max_update_probability, got ",
                                                   out.min_update_probability));
  }
  return out;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/statistics.h"

#include "absl/strings/str_cat.h"

namespace precondor {

absl::Status ExpectVectors(const LayerSpec& layer, const LayerStatistics& statistics) {
  const int64_t covariances = statistics.a_covariance.rows + statistics.g_covariance.rows;
  if (statistics.a.rows >= 1 && statistics.g.rows >= 1 && covariances == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name,
                                                 ": statistics: expected at least one vector, got ", statistics.a.rows,
                                                 " and ", statistics.g.rows, ", and ", covariances, " covariances"));
}

}  // namespace precondor

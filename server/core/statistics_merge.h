// SPDX-License-Identifier: Apache-2.0
// What ranks sent of one layer's statistic step, merged to what a method's update takes.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"
#include "server/core/contribution.h"
#include "server/core/scratch_pool.h"

namespace precondor {

// Contributions in rank order, at least one; they have passed CheckStatistics. Weighted by samples, always in rank
// order, so that any order of arrival gives the same bits:
//   MEAN: the mean of the vectors, in f64. Other vectors: stacked, by StackingScales.
//   COVARIANCE, per side: rows are stacked when no rank sent a covariance and they stay fewer elements than one;
//   otherwise the mean of the covariances, in f32, (1/n) X'X for a rank's rows X [n, d].
// The views lie in `scratch`, which has StatisticsScratchElements. Errors: the backend's, ResourceExhausted.
absl::StatusOr<LayerStatistics> MergeStatistics(const SessionSpec& spec, uint32_t layer,
                                                const std::vector<StagedContribution>& contributions, Backend& backend,
                                                ScratchPool::Lease& scratch);

}  // namespace precondor

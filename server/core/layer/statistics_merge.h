// SPDX-License-Identifier: Apache-2.0
// Merges what ranks sent of one layer's statistic step to the input of a method's update.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"
#include "server/core/api/contribution.h"
#include "server/core/resources/memory_pools.h"

namespace precondor {

// Merges contributions, weighted by samples. The sums are in rank order, so any order of arrival gives the same bits.
// - MEAN: the mean of the vectors, in f64. Other vectors: stacked, by StackingScales.
// - COVARIANCE, per side: the rows are stacked if no rank sent a covariance and all rows together have fewer elements
//   than one. Otherwise the mean of the covariances, in f32; that of a rank's rows X [n, d] is (1/n) X'X.
// The result's views lie in `scratch`, which has StatisticsScratchElements. Returns the backend's errors, and
// ResourceExhausted if the system has no memory for a buffer. Precondition: at least one contribution, in rank order;
// each has passed CheckStatistics.
absl::StatusOr<LayerStatistics> MergeStatistics(const SessionSpec& spec, uint32_t layer,
                                                const std::vector<StagedContribution>& contributions, Backend& backend,
                                                ScratchPool::Lease& scratch);

}  // namespace precondor

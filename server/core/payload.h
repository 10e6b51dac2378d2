// SPDX-License-Identifier: Apache-2.0
// Checks and decoding of what a contribution carries. Pure functions; every status has an ErrorReason.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "server/core/contribution.h"

namespace precondor {

// "step 5 layer 2 \"enc.0\" rank 1", for messages.
std::string DescribeKey(const SessionSpec& spec, const ContributionKey& key);

// Floats of one worker's statistics of a layer: q (d_in + d_out), or the most that COVARIANCE may have.
int64_t StatisticsElements(const SessionSpec& spec, uint32_t layer);

// 64 bits over everything in a contribution that must be equal in a repetition. Not stable between processes.
// `device_plane`: a gradient in f32 gives the same whether it comes as bytes or on the device, which takes a few times
// as long.
uint64_t Digest(const ContributionHeader& header, const Payload& payload, bool device_plane);

// InvalidArgument: NON_FINITE or OVER_NORM (some row's |v| > max_norm_per_sqrt_element * sqrt(d), for a packed
// covariance the root of its trace), naming the tensor and row. The header has passed CheckTensors
// (server/core/admission.h).
absl::Status CheckStatistics(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload,
                             double max_norm_per_sqrt_element);

// Rows of a and of g for StagedContribution::rows. The header has passed CheckTensors.
std::array<int64_t, 2> RowsOf(const SessionSpec& spec, const ContributionHeader& header);

// One side of a contribution that has passed CheckStatistics as floats: 0 is a, 1 is g.
struct StatisticsSide {
  int64_t rows = 0;  // 1 for a packed covariance
  int64_t cols = 0;
  bool packed = false;
  int64_t elements() const { return rows * cols; }
};
StatisticsSide SideOf(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side);
void DecodeStatistics(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side,
                      absl::Span<float> out);

// InvalidArgument NON_FINITE unless every element, times its scale, is finite in f32.
absl::Status CheckGradient(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Checks and decodes the payloads of contributions. Pure functions; every status has an ErrorReason.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"

namespace precondor {

// Describes a key for messages: "session \"bert\" step 5 layer 2 \"enc.0\" rank 1".
std::string DescribeKey(const SessionSpec& spec, const ContributionKey& key);

// Returns 64 bits that depend on everything that must be equal in a repetition. Not stable between processes. With
// `device_plane`, an f32 gradient has equal digests as bytes and in device memory; this takes a few times as long.
uint64_t Digest(const ContributionHeader& header, const Payload& payload, bool device_plane);

// Returns INVALID_ARGUMENT (NON_FINITE) if an element is not finite, and INVALID_ARGUMENT (OVER_NORM) if a row has |v|
// > max_norm_per_sqrt_element * sqrt(d); a packed covariance has the root of its trace in place of |v|. Both name the
// tensor and row. Precondition: the header has passed CheckTensors (server/core/layer/admission.h).
absl::Status CheckStatistics(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload,
                             double max_norm_per_sqrt_element);

// Returns the rows of a and of g for StagedContribution::rows. Precondition: the header has passed CheckTensors.
std::array<int64_t, 2> RowsOf(const SessionSpec& spec, const ContributionHeader& header);

// The shape of one side of a contribution: side 0 is a, side 1 is g. DecodeStatistics writes the side's elements as
// floats to `out`. Precondition of both functions: the contribution has passed CheckStatistics.
struct StatisticsSide {
  int64_t rows = 0;  // 1 for a packed covariance
  int64_t cols = 0;
  bool packed = false;
  int64_t elements() const { return rows * cols; }
};
StatisticsSide SideOf(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side);
void DecodeStatistics(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side,
                      absl::Span<float> out);

// Returns INVALID_ARGUMENT (NON_FINITE) unless every element, times its scale, is finite in f32, and INVALID_ARGUMENT
// (OVER_NORM) if the elements' norm is above `max_norm`. A gradient in device memory has no norm here. Precondition:
// the header has passed CheckTensors.
absl::Status CheckGradient(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload,
                           double max_norm);

}  // namespace precondor

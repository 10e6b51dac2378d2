// SPDX-License-Identifier: Apache-2.0
// The low-rank form's operations of kernels/operation.h on a device: an update of all factors in one launch, the
// products of all layers in four at most, or eight where some are f32's and some on tensor cores. As in
// kernels/cuda/grouped_operations.h.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// In stream order.
absl::Status RunLowRankAppends(Device& device, absl::Span<const operation::LowRankAppend* const> operations);
// Waits for the device where one asks for squares.
absl::Status RunLowRankPreconditions(Device& device,
                                     absl::Span<const operation::LowRankPrecondition* const> operations);

}  // namespace precondor::cuda

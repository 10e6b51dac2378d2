// SPDX-License-Identifier: Apache-2.0
// Runs the low-rank form's operations of kernels/operation.h on a device. One launch updates all factors. Large
// products are cuBLAS', in batches of a fixed size (kernels/cuda/fixed_batches.h). Small ones of f32 are our own
// kernel's: for each precision four launches for all of these, two for the rest, and up to seven for each shape and
// batch. The contract is that of kernels/cuda/grouped_operations.h.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// Runs in stream order.
absl::Status RunLowRankAppends(Device& device, absl::Span<const operation::LowRankAppend* const> operations);
// Waits for the device if an operation asks for squares.
absl::Status RunLowRankPreconditions(Device& device,
                                     absl::Span<const operation::LowRankPrecondition* const> operations);

}  // namespace precondor::cuda

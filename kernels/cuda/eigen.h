// SPDX-License-Identifier: Apache-2.0
// Eigendecompositions of many small symmetric matrices by cuSOLVER's batched routine, those of one size in one call.
// As in kernels/cuda/grouped_operations.h; docs/adr/0014-batched-eigendecompositions.md.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// What SymmetricEigen says where a decomposition left this info: OK for 0, not finite for a negative one.
absl::Status EigenStatus(int info);
// Of matrices of at most kMostRowsOfSymmetricEigens rows; waits for the device. statuses[i]: FailedPrecondition where
// there is no decomposition.
absl::Status RunSymmetricEigens(Device& device, absl::Span<const operation::SymmetricEigen* const> operations,
                                absl::Span<absl::Status> statuses);

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// Decomposes many small symmetric matrices by cuSOLVER's batched routine, those of one size in one call. The contract
// is that of kernels/cuda/grouped_operations.h, but bits may depend on the other matrices
// (docs/develop/adr/0014-batched-eigendecompositions.md).
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// Converts the info of a decomposition to the status of SymmetricEigen: OK for 0, FailedPrecondition for a negative
// info (an element is not finite) and for a positive one (no convergence).
absl::Status EigenStatus(int info);
// Precondition: each matrix has at most kMostRowsOfSymmetricEigens rows. Waits for the device. Sets statuses[i] to
// FailedPrecondition if operation i has no decomposition.
absl::Status RunSymmetricEigens(Device& device, absl::Span<const operation::SymmetricEigen* const> operations,
                                absl::Span<absl::Status> statuses);

}  // namespace precondor::cuda

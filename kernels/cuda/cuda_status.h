// SPDX-License-Identifier: Apache-2.0
// Converts errors of the CUDA runtime to statuses.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor::cuda {

// Returns OK for success, ResourceExhausted if memory is short, Unavailable if there is no usable device or driver, and
// Internal otherwise. The message has `what`, the operation that failed, and CUDA's name and description of the error.
absl::Status ToStatus(absl::string_view what, cudaError_t error);

// Returns true for errors after which the process can no longer use the device.
bool IsFatal(cudaError_t error);

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// Errors of the CUDA runtime as statuses.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor::cuda {

// OK for success; ResourceExhausted when memory is what lacks, Unavailable when there is no device or no driver for it,
// Internal otherwise. The message names `what`, which the caller was doing, and CUDA's name of the error.
absl::Status ToStatus(absl::string_view what, cudaError_t error);

// True for errors after which the process can use the device no more.
bool IsFatal(cudaError_t error);

}  // namespace precondor::cuda

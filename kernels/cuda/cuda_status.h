// SPDX-License-Identifier: Apache-2.0
// Converts errors of the CUDA runtime, cuBLAS and cuSOLVER to statuses.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor::cuda {

// Returns OK for success, ResourceExhausted if memory is short, Unavailable if there is no usable device or driver, and
// Internal otherwise. The message has `what`, the operation that failed, and CUDA's name and description of the error.
absl::Status ToStatus(absl::string_view what, cudaError_t error);

// Returns Unavailable for a device that is older than those for which the kernels are compiled.
absl::Status CheckCapability(int device);

// Returns true for errors after which the process can no longer use the device.
bool IsFatal(cudaError_t error);

// Returns OK for success, ResourceExhausted if an allocation failed, and Internal otherwise. The message has `what`,
// the operation that failed.
absl::Status ToStatus(absl::string_view what, cublasStatus_t error);
absl::Status ToStatus(absl::string_view what, cusolverStatus_t error);

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// Converts errors of cuBLAS and cuSOLVER to statuses.
#pragma once

#include <cublas_v2.h>
#include <cusolverDn.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor::cuda {

// Returns OK for success, ResourceExhausted if an allocation failed, and Internal otherwise. The message has `what`,
// the operation that failed.
absl::Status ToStatus(absl::string_view what, cublasStatus_t error);
absl::Status ToStatus(absl::string_view what, cusolverStatus_t error);

}  // namespace precondor::cuda

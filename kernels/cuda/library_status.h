// SPDX-License-Identifier: Apache-2.0
// Errors of the libraries above the CUDA runtime as statuses.
#pragma once

#include <cublas_v2.h>
#include <cusolverDn.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor::cuda {

// As ToStatus of cuda_status.h.
absl::Status ToStatus(absl::string_view what, cublasStatus_t error);
absl::Status ToStatus(absl::string_view what, cusolverStatus_t error);

}  // namespace precondor::cuda

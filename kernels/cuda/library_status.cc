// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/library_status.h"

#include "absl/strings/str_cat.h"

namespace precondor::cuda {

absl::Status ToStatus(absl::string_view what, cublasStatus_t error) {
  if (error == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": cuBLAS: ", cublasGetStatusString(error));
  return error == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(message) : absl::InternalError(message);
}

absl::Status ToStatus(absl::string_view what, cusolverStatus_t error) {
  if (error == CUSOLVER_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": cuSOLVER: status ", static_cast<int>(error));
  return error == CUSOLVER_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(message) : absl::InternalError(message);
}

}  // namespace precondor::cuda

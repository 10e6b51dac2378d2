// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace precondor::cuda {

absl::Status ToStatus(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
    case cudaErrorDevicesUnavailable:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::Status CheckCapability(int device) {
  int major = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess || major >= 8) return ToStatus("CUDA device", error);
  return absl::UnavailableError(
      absl::StrCat("CUDA device ", device, ": expected compute capability 8.0 or later, got ", major, ".x"));
}

bool IsFatal(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

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

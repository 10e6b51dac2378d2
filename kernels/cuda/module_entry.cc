// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_module.h"

// The name is that of an exported symbol: NOLINTBEGIN(readability-identifier-naming)
extern "C" {
extern __attribute__((visibility("default"))) const precondor::CudaModuleEntry precondor_cuda_module;
const precondor::CudaModuleEntry precondor_cuda_module = {PRECONDOR_VERSION, &precondor::MakeCudaBackend,
                                                          &precondor::MakeCudaPlane};
}
// NOLINTEND(readability-identifier-naming)

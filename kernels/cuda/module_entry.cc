// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/module_entry.h"

extern "C" {
extern __attribute__((visibility("default"))) const precondor::CudaModuleEntry precondor_cuda_module;
const precondor::CudaModuleEntry precondor_cuda_module = {PRECONDOR_VERSION, &precondor::MakeCudaBackend};
}

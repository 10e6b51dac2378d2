// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/nccl_module_entry.h"

#include "kernels/cuda/host_nccl_collective.h"

// The name is that of an exported symbol: NOLINTBEGIN(readability-identifier-naming)
extern "C" {
extern __attribute__((visibility("default"))) const precondor::NcclModuleEntry precondor_nccl_module;
const precondor::NcclModuleEntry precondor_nccl_module = {
    PRECONDOR_VERSION, &precondor::NewNcclId, &precondor::MakeNcclCollective, &precondor::MakeHostNcclCollective};
}
// NOLINTEND(readability-identifier-naming)

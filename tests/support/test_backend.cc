// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_backend.h"

#include "kernels/cpu/cpu_backend.h"

namespace precondor {

std::unique_ptr<Backend> MakeTestBackend() { return MakeCpuBackend(CpuBackendOptions()).value(); }

}  // namespace precondor

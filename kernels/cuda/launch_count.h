// SPDX-License-Identifier: Apache-2.0
// Number of kernels that this process has launched, for tests and benchmarks. A call of a library counts as one.
#pragma once

#include <atomic>
#include <cstdint>

namespace precondor::cuda {

inline std::atomic<int64_t> launch_count{0};

}  // namespace precondor::cuda

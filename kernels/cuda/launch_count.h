// SPDX-License-Identifier: Apache-2.0
// How many kernels this process has launched so far, for tests and benchmarks; a call of a library counts as one.
#pragma once

#include <atomic>
#include <cstdint>

namespace precondor::cuda {

inline std::atomic<int64_t> launch_count{0};

}  // namespace precondor::cuda

// SPDX-License-Identifier: Apache-2.0
// The CPU backend: OpenBLAS for products, LAPACK in f64 for decompositions. BLAS uses one thread. Layers run in
// parallel, one thread each, which also makes every result independent of the number of cores.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/backend.h"

namespace precondor {

struct CpuBackendOptions {
  int64_t memory_limit_bytes = std::numeric_limits<int64_t>::max();  // limit of live matrices
  int64_t cache_limit_bytes = int64_t{256} << 20;                    // limit of freed blocks that are kept for reuse
};

// Makes a CPU backend. Thread-safe as Backend says. Sets the process' OpenBLAS to one thread. Returns InvalidArgument
// if a limit is out of range.
absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuBackendOptions& options);

}  // namespace precondor

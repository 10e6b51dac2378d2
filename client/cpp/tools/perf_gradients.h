// SPDX-License-Identifier: Apache-2.0
// The workload gradients of precondor-perf.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// Measures the throughput of gradients by size, in GB/s of both directions together, and the latency of small ones.
// Several tensors of a size are in flight at a time, as in a backward pass. The limit of a row is plain TCP, which
// moves the same bytes to an echo in this process and back.
absl::StatusOr<std::vector<PerfRow>> MeasureGradients(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

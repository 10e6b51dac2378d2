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
// Several tensors of a size are in flight at a time, as in a backward pass. The limit of a row is a blocking echo over
// plain TCP in this process. The processor time of both processes has a row of its own.
absl::StatusOr<std::vector<PerfRow>> MeasureGradients(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

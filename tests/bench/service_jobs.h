// SPDX-License-Identifier: Apache-2.0
// The rows jobs/ of service_bench.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf.h"

namespace precondor {

// Measures the steps of a small job, in turns alone and beside a large job whose layers keep the server's threads busy.
absl::StatusOr<std::vector<PerfRow>> MeasureJobs(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

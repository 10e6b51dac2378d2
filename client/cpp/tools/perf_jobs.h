// SPDX-License-Identifier: Apache-2.0
// Workload jobs.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// The steps of a small job alone, and beside a large one whose layers keep the server's threads busy, in turns.
absl::StatusOr<std::vector<PerfRow>> MeasureJobs(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

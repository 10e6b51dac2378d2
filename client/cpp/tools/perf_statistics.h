// SPDX-License-Identifier: Apache-2.0
// Workloads bert-large and statistics.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// A step begins when all workers begin to send and ends when every layer has applied all of it. Memory is compared with
// the factors' vectors and what the server has reserved for staging and scratch.
absl::StatusOr<std::vector<PerfRow>> MeasureStatistics(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

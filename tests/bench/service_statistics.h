// SPDX-License-Identifier: Apache-2.0
// The rows statistics/ and memory/ of service_bench.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf.h"

namespace precondor {

// Measures steps, and the server's memory. A step begins when all workers begin to send, and ends when every layer has
// applied all statistics. Memory is compared with the factors' vectors and with the state that the server reports, each
// plus two copies of a step's statistics.
absl::StatusOr<std::vector<PerfRow>> MeasureStatistics(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

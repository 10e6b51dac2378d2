// SPDX-License-Identifier: Apache-2.0
// Workload plan: the seconds that precondorctl plan computes against those that steps take on this machine.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// Measures the two rates that a plan takes with every second layer: the network's with method identity, that of the
// arithmetic with mkor and statistics at every tenth step. Then plans a step of all layers, runs such steps, and
// compares: network and arithmetic of a shard, one after the other. The rows are those of the median of three rounds.
absl::StatusOr<std::vector<PerfRow>> MeasurePlan(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

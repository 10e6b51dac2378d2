// SPDX-License-Identifier: Apache-2.0
// The workload plan of precondor-perf: compares the seconds that precondorctl plan computes with those that steps take
// on this machine.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// Measures the two rates that a plan needs, with every second layer: the network's with method identity, and the
// arithmetic's with mkor and statistics at every tenth step. Then plans a step of all layers, runs these steps, and
// compares. The planned step is the network's time plus that of a shard's arithmetic. Returns the rows of the median of
// three rounds.
absl::StatusOr<std::vector<PerfRow>> MeasurePlan(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

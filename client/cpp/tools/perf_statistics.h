// SPDX-License-Identifier: Apache-2.0
// Workloads bert-large and statistics.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"
#include "client/cpp/tools/perf_steps.h"

namespace precondor {

// A step begins when all workers begin to send and ends when every layer has applied all of it. Memory is compared with
// the factors' vectors and what the server has reserved for staging and scratch.
absl::StatusOr<std::vector<PerfRow>> MeasureStatistics(const PerfOptions& options, const PerfServer& server);

// Such steps with method mkor, in a session of their own, of options.workers workers and factors of rank options.rank.
absl::StatusOr<std::unique_ptr<PerfSteps>> OpenStatisticSteps(const PerfOptions& options,
                                                              const std::vector<LayerSpec>& layers,
                                                              const PerfServer& server);

}  // namespace precondor

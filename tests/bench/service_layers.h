// SPDX-License-Identifier: Apache-2.0
// The rows layers/ of service_bench.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf.h"

namespace precondor {

// Measures the step of one worker with 16 layers of 64 x 64 and the method identity, so that only transport and core
// count: its time, and the processor time of both processes for a layer.
absl::StatusOr<std::vector<PerfRow>> MeasureLayers(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

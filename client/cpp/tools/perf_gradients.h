// SPDX-License-Identifier: Apache-2.0
// Workload gradients.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// GB/s count both directions. Several tensors of a size are under way at a time, as in a backward pass; TCP moves the
// same bytes there and back through an echo in this process.
absl::StatusOr<std::vector<PerfRow>> MeasureGradients(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor

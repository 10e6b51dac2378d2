// SPDX-License-Identifier: Apache-2.0
// Runs a job with one process a worker and gathers what they report.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/examples/job.h"

namespace precondor::digits {

// Starts job.workers processes of this very program with --worker-rank, before and without touching gRPC here, and
// waits for them. Returns one result a run: rank 0's curve, the slowest worker's seconds, bytes summed over the
// workers. Internal when a worker fails (the others are stopped) or when the replicas' final weights differ. `progress`
// sees rank 0's evaluations. Not thread-safe: no other child of this process may end meanwhile.
absl::StatusOr<std::vector<RunResult>> LaunchWorkers(const Job& job,
                                                     const std::function<void(const WorkerReport&)>& progress);

}  // namespace precondor::digits

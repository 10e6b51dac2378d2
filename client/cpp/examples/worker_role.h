// SPDX-License-Identifier: Apache-2.0
// A worker process of the example: reads its job, trains, reports.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

#include "client/cpp/examples/job.h"
#include "client/cpp/examples/shared_reducer.h"

namespace precondor::digits {

// Does every run of `job` as rank `rank` through the service at job.coordinator. Rank 0 opens and closes the sessions,
// evaluates, and reports progress; every rank reports the end of a run. All ranks of the job share `reducer`'s region.
absl::Status WorkThrough(const Job& job, int32_t rank, SharedReducer& reducer,
                         const std::function<void(const WorkerReport&)>& report);

// The whole life of a worker process: the job is on stdin, the reducer's region behind `reducer_fd`, reports go to
// stdout. Returns the exit status; what went wrong is on stderr.
int WorkerMain(int32_t rank, int reducer_fd);

// How long worker processes wait for each other between two exchanges.
inline constexpr absl::Duration kReducerTimeout = absl::Seconds(120);

}  // namespace precondor::digits

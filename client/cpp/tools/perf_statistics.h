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

namespace precondor {

// A step begins when all workers begin to send and ends when every layer has applied all of it. Memory is compared with
// the factors' vectors and what the server has reserved for staging and scratch.
absl::StatusOr<std::vector<PerfRow>> MeasureStatistics(const PerfOptions& options, const PerfServer& server);

// Such steps with method mkor, one by one. One thread at a time.
class StatisticSteps {
 public:
  // A session of its own, of options.workers workers and factors of rank options.rank.
  static absl::StatusOr<std::unique_ptr<StatisticSteps>> Open(const PerfOptions& options,
                                                              const std::vector<LayerSpec>& layers,
                                                              const PerfServer& server);
  virtual ~StatisticSteps() = default;
  // Seconds of the next step.
  virtual absl::StatusOr<double> Step() = 0;
  // Payload bytes that one worker has sent.
  virtual int64_t statistics_bytes() const = 0;
  virtual absl::Status Close() = 0;
};

}  // namespace precondor

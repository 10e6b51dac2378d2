// SPDX-License-Identifier: Apache-2.0
// Runs the workload training with several numbers of workers. Each number gives a row, which is measured until it is
// steady.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// Decides when a measurement may end: when its last three windows are within 10 % of each other, or after kMost
// windows.
class SteadyWindows {
 public:
  static constexpr size_t kCompared = 3;
  static constexpr size_t kMost = 9;
  static constexpr double kSpread = 0.1;

  // Adds a window by its mean step in seconds.
  void Add(double seconds) { seconds_.push_back(seconds); }
  // Returns (longest - shortest) / shortest of the last three windows, or 1 if there are fewer.
  double spread() const;
  bool steady() const { return spread() <= kSpread; }
  bool done() const { return steady() || seconds_.size() >= kMost; }
  size_t count() const { return seconds_.size(); }

 private:
  std::vector<double> seconds_;
};

struct SweepRow {
  int64_t workers = 0;
  double step_p50_ms = 0;  // of the steps of the last three windows, like the fields below
  double step_p99_ms = 0;
  double steps_per_second = 0;        // time between steps does not count
  double received_mb_per_second = 0;  // 1e6 payload bytes a second, of all workers together
  size_t windows = 0;
  double spread = 0;  // SteadyWindows::spread()
  bool steady = false;
};

// Runs each number of workers of `options.sweep`, one after another, each in its own session.
absl::StatusOr<std::vector<SweepRow>> MeasureSweep(const PerfOptions& options, const PerfServer& server);

std::string SweepTable(const std::vector<SweepRow>& rows);
std::string SweepJson(const std::vector<SweepRow>& rows);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Workloads bert-large, statistics and training by the number of workers: a row for each, measured until it is steady.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_server.h"

namespace precondor {

// When a measurement may end: its last three windows are within 10 % of each other, or there have been kMost of them.
class SteadyWindows {
 public:
  static constexpr size_t kCompared = 3;
  static constexpr size_t kMost = 9;
  static constexpr double kSpread = 0.1;

  // The mean step of a window.
  void Add(double seconds) { seconds_.push_back(seconds); }
  // Of the last three windows, (longest - shortest) / shortest; 1 while there are fewer.
  double spread() const;
  bool steady() const { return spread() <= kSpread; }
  bool done() const { return steady() || seconds_.size() >= kMost; }
  size_t count() const { return seconds_.size(); }

 private:
  std::vector<double> seconds_;
};

struct SweepRow {
  int64_t workers = 0;
  double step_p50_ms = 0;  // of the steps of the last three windows, as the others
  double step_p99_ms = 0;
  double steps_per_second = 0;        // while steps are under way
  double received_mb_per_second = 0;  // 1e6 payload bytes, of all workers together
  size_t windows = 0;
  double spread = 0;  // SteadyWindows
  bool steady = false;
};

// Runs `options.sweep`, one number of workers after the other, each in a session of its own.
absl::StatusOr<std::vector<SweepRow>> MeasureSweep(const PerfOptions& options, const PerfServer& server);

std::string SweepTable(const std::vector<SweepRow>& rows);
std::string SweepJson(const std::vector<SweepRow>& rows);
// A heading, then a line for each row.
std::string SweepCsv(const std::vector<SweepRow>& rows);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The workload training: steps like those of a training job, with statistics at every tenth step, a gradient of each
// layer and its answer, and a report; and its sweep over numbers of workers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/tools/perf.h"
#include "kernels/base/session_spec.h"
#include "precondor/client.h"

namespace precondor {

// Runs body(rank), which returns a Status, for ranks 0 ... count - 1, each on its own thread. Returns the first error
// in the order of ranks.
template <typename Body>
absl::Status ForEachRank(size_t count, const Body& body) {
  std::vector<absl::Status> statuses(count);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  absl::Status all;
  for (const absl::Status& status : statuses) all.Update(status);
  return all;
}

// Returns the description of a session with options.workers workers. mkor has factors of rank options.rank; other
// methods have their defaults.
SessionSpec TrainingSpec(const PerfOptions& options, const std::vector<LayerSpec>& layers, const std::string& method,
                         ExchangeMode exchange);

// Runs training steps of a session. Not thread-safe.
class TrainingSteps {
 public:
  // Opens the session and joins all ranks.
  static absl::StatusOr<std::unique_ptr<TrainingSteps>> Open(const SessionSpec& spec, const PerfServer& server);

  // Runs the next `steps` steps. Ranks wait for each other only where the session makes them.
  absl::Status Run(uint64_t steps);
  // Runs the next step and returns its seconds.
  absl::StatusOr<double> Step();
  // Returns the number of steps after which they repeat. Measurements that are compared have whole cycles.
  int64_t cycle() const { return spec_.inv_freq; }
  // Returns the payload bytes that all workers together have sent.
  int64_t sent_bytes() const;
  absl::Status Close();

 private:
  // One rank's tensors.
  struct RankData {
    std::vector<std::vector<float>> gradients, answers;  // by layer; empty if another rank sends the layer's gradient
    std::vector<float> vectors;
  };

  explicit TrainingSteps(SessionSpec spec);
  static RankData MakeData(const SessionSpec& spec, uint32_t rank);
  absl::Status RunStep(uint32_t rank, uint64_t step);

  const SessionSpec spec_;
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<RankData> data_;
  uint64_t next_ = 0;
};

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

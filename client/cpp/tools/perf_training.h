// SPDX-License-Identifier: Apache-2.0
// Steps like those of a training job: statistics at every tenth step, a gradient of each layer and its answer, and a
// report.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_server.h"
#include "client/cpp/tools/perf_steps.h"
#include "kernels/base/session_spec.h"
#include "precondor/client.h"

namespace precondor {

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

}  // namespace precondor

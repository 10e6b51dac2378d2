// SPDX-License-Identifier: Apache-2.0
// What one run gave, as JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "client/cpp/examples/run.h"
#include "client/cpp/examples/trainer.h"

namespace precondor::digits {

// One worker's steps. The last three hold what was used before each step, and at the end.
struct StepLog {
  uint64_t first_step = 0;
  std::vector<Mode> modes;
  std::vector<double> seconds;
  std::vector<int64_t> statistics_bytes;  // payload
  std::vector<int64_t> gradient_bytes;    // payload, both directions
};

struct RankResult {
  TrainResult trained;
  StepLog log;
};

// Internal when the workers' final weights or modes differ: replicas must be equal bit for bit.
absl::Status CheckReplicas(const std::vector<RankResult>& ranks);

// One JSON object (docs/digits.md has its fields) of the workers in this process: the first one's curve, the slowest
// one's seconds, and the bytes of all. A number that is not finite is null.
std::string ResultJson(const Run& run, const std::vector<RankResult>& ranks);

}  // namespace precondor::digits

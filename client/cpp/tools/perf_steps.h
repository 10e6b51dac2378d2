// SPDX-License-Identifier: Apache-2.0
// A session of a load and its steps.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace precondor {

// One thread at a time.
class PerfSteps {
 public:
  virtual ~PerfSteps() = default;
  // After so many steps they repeat: what is compared has whole cycles.
  virtual int64_t cycle() const { return 1; }
  // Seconds of the next step.
  virtual absl::StatusOr<double> Step() = 0;
  // Payload bytes that all workers together have sent.
  virtual int64_t sent_bytes() const = 0;
  virtual absl::Status Close() = 0;
};

// Runs body(rank), which gives a Status, for ranks 0 ... count - 1, each on a thread of its own. The first error.
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

}  // namespace precondor

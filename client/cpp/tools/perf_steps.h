// SPDX-License-Identifier: Apache-2.0
// The steps of a session under load.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace precondor {

// Runs the steps of one session. Not thread-safe.
class PerfSteps {
 public:
  virtual ~PerfSteps() = default;
  // Returns the number of steps after which they repeat. Measurements that are compared have whole cycles.
  virtual int64_t cycle() const { return 1; }
  // Runs the next step and returns its seconds.
  virtual absl::StatusOr<double> Step() = 0;
  // Returns the payload bytes that all workers together have sent.
  virtual int64_t sent_bytes() const = 0;
  virtual absl::Status Close() = 0;
};

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

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The ranks of a session under load, a thread each.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/status/status.h"

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

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Counters for Worker::traffic().
#pragma once

#include <atomic>
#include <cstdint>

#include "precondor/client.h"

namespace precondor {

// Thread-safe. Read does not return a consistent snapshot of all counters.
struct TrafficCounters {
  std::atomic<int64_t> statistics_bytes{0};
  std::atomic<int64_t> gradient_bytes{0};
  std::atomic<int64_t> result_bytes{0};
  std::atomic<int64_t> overhead_bytes{0};
  std::atomic<int64_t> reconnects{0};

  Traffic Read() const {
    Traffic traffic;
    traffic.statistics_bytes = statistics_bytes.load(std::memory_order_relaxed);
    traffic.gradient_bytes = gradient_bytes.load(std::memory_order_relaxed);
    traffic.result_bytes = result_bytes.load(std::memory_order_relaxed);
    traffic.overhead_bytes = overhead_bytes.load(std::memory_order_relaxed);
    traffic.reconnects = reconnects.load(std::memory_order_relaxed);
    return traffic;
  }
};

}  // namespace precondor

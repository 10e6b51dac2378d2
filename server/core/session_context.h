// SPDX-License-Identifier: Apache-2.0
// What the layers of one session share. Held by shared_ptr, because work on an executor may outlive the session.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/backend.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/cost_table.h"
#include "server/core/executor.h"
#include "server/core/memory_account.h"
#include "server/core/observer.h"
#include "server/core/scratch_pool.h"
#include "server/core/shard.h"
#include "server/core/shard_lease.h"

namespace precondor {

// One per shard. The references outlive the executor's last task.
struct ShardContext {
  ShardOptions options;
  Backend& backend;
  Executor& executor;
  const Clock& clock;
  Logger& logger;
  Observer& observer;
  CostTable costs;
  MemoryAccount memory;
  ShardLeaseHolder lease = {};
  std::atomic<int64_t> in_flight = 0;  // unanswered gradients and unfinished updates
};

// One per session. Const after construction but for the pools, which lock, and the atomics.
struct SessionContext {
  void NoteRelease(uint64_t release) {
    uint64_t last = last_release.load();
    while (last < release && !last_release.compare_exchange_weak(last, release)) {
    }
  }

  std::shared_ptr<ShardContext> shard;
  uint64_t session_id = 0;
  SessionSpec spec;
  MethodSet methods;
  ScratchPool statistics_scratch;         // StatisticsScratchElements of the widest layer
  ScratchPool gradient_scratch;           // D, then U, of the largest layer
  std::atomic<int64_t> installed_ns = 0;  // last, by the coordinator, on the monotonic clock; 0: not since the start
  std::atomic<uint64_t> last_step = 0;
  std::atomic<uint64_t> snapshot_at = 0;             // a cut that somebody asked for, besides the regular ones
  std::atomic<uint64_t> after_last_first_order = 0;  // the greatest step in first order, plus one
  std::atomic<uint64_t> last_release = 0;            // the greatest number under which factors were kept
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// What all sessions of a shard share. Held by shared_ptr, because work on an executor may outlive the shard.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "server/core/cost_table.h"
#include "server/core/memory_account.h"
#include "server/core/observer.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_lease.h"
#include "server/core/shard/shard_options.h"

namespace precondor {

// One per shard. The references outlive the executor's last task.
struct ShardContext {
  // Devices that have a layer together which is split.
  int ranks() const { return options.group == nullptr ? 1 : options.group->size(); }

  ShardOptions options;
  std::vector<ShardDevice> devices;  // const
  const Clock& clock;
  Logger& logger;
  LayerObserver& layer_observer;
  ShardObserver& observer;
  CostTable costs;
  MemoryAccount memory;
  ShardLeaseHolder lease = {};
  std::atomic<int64_t> in_flight = 0;  // unanswered gradients and unfinished updates
};

std::shared_ptr<ShardContext> MakeShardContext(const ShardOptions& options, std::vector<ShardDevice> devices,
                                               const Clock& clock, Logger& logger, Observer& observer);

// The devices, in their order: what is reserved on each, and whether a fault has ended its use. Thread-safe.
std::vector<DeviceUse> DescribeDevices(const ShardContext& shard);

}  // namespace precondor

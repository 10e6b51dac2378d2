// SPDX-License-Identifier: Apache-2.0
// State that all sessions of a shard share. It is held by shared_ptr because work on an executor can outlive the shard.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "server/core/api/observer.h"
#include "server/core/api/shard_control.h"
#include "server/core/resources/memory_account.h"
#include "server/core/resources/shard_options.h"

namespace precondor {

// One per shard. The referenced objects must outlive the executors' last tasks.
struct ShardContext {
  ShardOptions options;
  std::vector<ShardDevice> devices;  // constant after construction
  const Clock& clock;
  Logger& logger;
  LayerObserver& layer_observer;
  ShardObserver& observer;
  MemoryAccount memory;
  std::atomic<int64_t> in_flight = 0;  // unanswered gradients and unfinished updates
};

std::shared_ptr<ShardContext> MakeShardContext(const ShardOptions& options, std::vector<ShardDevice> devices,
                                               const Clock& clock, Logger& logger, Observer& observer);

// Describes the devices in their order: reserved bytes, and the fault that made a device unusable. Thread-safe.
std::vector<DeviceUse> DescribeDevices(const ShardContext& shard);

}  // namespace precondor

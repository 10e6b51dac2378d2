// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/shard_context.h"

#include <string>
#include <utility>

#include "kernels/base/check.h"

namespace precondor {

std::shared_ptr<ShardContext> MakeShardContext(const ShardOptions& options, std::vector<ShardDevice> devices,
                                               const Clock& clock, Logger& logger, Observer& observer) {
  PRECONDOR_CHECK(!devices.empty());
  std::vector<std::string> names;
  names.reserve(devices.size());
  for (const ShardDevice& device : devices) names.push_back(device.name);
  return std::shared_ptr<ShardContext>(
      new ShardContext{.options = options,
                       .devices = std::move(devices),
                       .clock = clock,
                       .logger = logger,
                       .layer_observer = observer,
                       .observer = observer,
                       .memory = MemoryAccount(std::move(names), options.capacity_bytes, observer)});
}

std::vector<DeviceUse> DescribeDevices(const ShardContext& shard) {
  const DeviceBytes reserved = shard.memory.reserved();
  std::vector<DeviceUse> uses;
  for (size_t i = 0; i < reserved.of.size(); ++i) {
    uses.push_back({.name = shard.devices[i].name,
                    .capacity_bytes = shard.memory.capacity(),
                    .reserved_bytes = reserved.of[i],
                    .fault = std::string(shard.devices[i].backend.fault().message()),
                    .ring_device = shard.options.ring_device});
  }
  return uses;
}

}  // namespace precondor

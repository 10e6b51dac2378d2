// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/shard_context.h"

namespace precondor {

DeviceUse DescribeDevice(const ShardContext& shard) {
  const std::string& name = shard.options.device_name;
  return {.name = name.empty() ? std::string(shard.backend.name()) : name,
          .capacity_bytes = shard.memory.capacity(),
          .reserved_bytes = shard.memory.reserved(),
          .fault = std::string(shard.backend.fault().message()),
          .ring_device = shard.options.ring_device};
}

}  // namespace precondor

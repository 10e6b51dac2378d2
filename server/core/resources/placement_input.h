// SPDX-License-Identifier: Apache-2.0
// The input of placement: costs and sizes of a session's layers, and the devices of shards.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/api/shard_control.h"
#include "server/policy/placement.h"

namespace precondor {

// Returns cost and memory of every layer. The cost is the FLOPs of one step: update and preconditioning.
std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods);

// Returns the devices of the shard with index `place`. Placement fills devices, because a layer is on one of them.
std::vector<PlacementShard> DeviceRooms(const ShardDescription& shard, size_t place);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The input of placement: costs and sizes of a session's layers, and the devices of shards.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/api/shard_control.h"
#include "server/policy/placement.h"

namespace precondor {

// Returns cost and memory of every layer. If a shard has measured the layer's method and shape, the cost is the mean of
// these measurements, in seconds. Otherwise it is the layer's FLOPs times the mean seconds per FLOP of its method's
// measured shapes, or of all methods' if its own has none. If nothing has been measured, costs are FLOPs.
std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods,
                                           absl::Span<const MeasuredCost> costs);

// Returns the devices of the shard with index `place`, which has `load` so far, spread evenly over its devices.
// Placement fills devices, because a layer is on one of them.
std::vector<PlacementShard> DeviceRooms(const ShardDescription& shard, double load, size_t place);

}  // namespace precondor

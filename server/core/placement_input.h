// SPDX-License-Identifier: Apache-2.0
// What placement knows of a session's layers and of shards.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/shard/shard_control.h"
#include "server/policy/placement.h"

namespace precondor {

// Cost and memory of every layer. A layer whose method and shape a shard has measured costs the mean of those
// measurements, in seconds; any other its FLOPs times the seconds per FLOP of its method's measured shapes, or else
// of any method's. With nothing measured, costs are FLOPs. Layers that split borrow `spec` and `methods`.
std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods,
                                           absl::Span<const MeasuredCost> costs);

// The devices of one shard, the place-th, which bears `load` so far: placement fills these, since a layer is on one of
// them, or split over all.
std::vector<PlacementShard> DeviceRooms(const ShardDescription& shard, double load, size_t place);

}  // namespace precondor

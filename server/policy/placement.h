// SPDX-License-Identifier: Apache-2.0
// Assigns layers to shards by the rule "longest processing time first". A pure function.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace precondor {

struct PlacementLayer {
  double cost = 0;    // cost of one step, in a unit common to all layers; not negative
  int64_t bytes = 0;  // memory of the owner, in bytes
};

struct PlacementShard {
  int64_t free_bytes = 0;
  std::string ring_device = {};  // identifies its device to workers that share its memory; empty: none do
};

struct Placement {
  bool feasible = false;
  std::vector<int32_t> shard_of_layer;  // if feasible, one entry per layer
  std::vector<double> load;             // cost per shard
  std::string reason;                   // the balance, or the layer that does not fit, with the numbers
};

// Assigns the layers, by descending cost, to the least loaded shard with room. Ties go to the lower layer and the lower
// shard index, so that equal inputs always give equal results.
Placement PlaceLayers(absl::Span<const PlacementLayer> layers, absl::Span<const PlacementShard> shards);

// Returns the rank that sends each layer's gradient: of the ranks on the layer's device one after the other, and rank
// layer % ranks for a layer on no rank's device. `rank_devices` has each rank's `ring_device`, or an empty text. Empty
// if no layer is on a rank's device.
std::vector<uint32_t> DelegateByDevice(const Placement& placement, absl::Span<const PlacementShard> shards,
                                       absl::Span<const std::string> rank_devices);

}  // namespace precondor

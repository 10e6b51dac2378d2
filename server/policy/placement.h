// SPDX-License-Identifier: Apache-2.0
// Which shard owns which layer: longest processing time first. A pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace precondor {

struct PlacementLayer {
  double cost = 0;    // of one step, in any unit that all layers share; not negative
  int64_t bytes = 0;  // memory of the owner
  // Of a layer that a shard's devices have together where there are several, the memory of the owner and of each other
  // one, by how many they are. Null: one device has it everywhere.
  struct Parts {
    int64_t own = 0;
    int64_t other = 0;
  };
  std::function<Parts(int devices)> parts = nullptr;
};

// A shard, or one of its devices.
struct PlacementShard {
  int64_t free_bytes = 0;
  double load = 0;   // cost of what it has already
  size_t shard = 0;  // whose device it is; a shard's follow each other
};

struct Placement {
  bool feasible = false;
  std::vector<int32_t> shard_of_layer;  // when feasible, one entry a layer
  std::vector<double> load;             // cost per shard, with what it had
  std::string reason;                   // the balance reached, or which layer fits nowhere, with the numbers
};

// Layers by descending cost go to the least loaded shard that has room for them. One with parts is shared out, cost and
// memory, over all devices of the shard to one of which it goes. Ties go to the lower layer and the lower shard number,
// so that equal inputs give equal maps everywhere.
Placement PlaceLayers(absl::Span<const PlacementLayer> layers, absl::Span<const PlacementShard> shards);

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The shard of each layer of a session.
#pragma once

#include <utility>
#include <vector>

#include "server/core/api/coordinator_journal.h"

namespace precondor {

// A session keeps its placement to its end. Immutable.
class SessionPlacement {
 public:
  // `shards` has one entry for each shard of the coordinator, in its order, without layers if the shard has none.
  explicit SessionPlacement(std::vector<PlacedLayers> shards) : shards_(std::move(shards)) {}

  const std::vector<PlacedLayers>& shards() const { return shards_; }
  // Returns the parts of a snapshot of all layers, none of them durable.
  std::vector<SnapshotPart> MakeParts() const;

 private:
  std::vector<PlacedLayers> shards_;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_placement.h"

namespace precondor {

std::vector<SnapshotPart> SessionPlacement::MakeParts() const {
  std::vector<SnapshotPart> parts;
  for (const PlacedLayers& placed : shards_) {
    if (!placed.layers.empty()) parts.push_back({.shard = placed.shard, .layers = placed.layers});
  }
  return parts;
}

}  // namespace precondor

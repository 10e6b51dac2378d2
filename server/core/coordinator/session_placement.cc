// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_placement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace precondor {

void SessionPlacement::Adopt(std::vector<PlacedLayers> shards) {
  shards_ = std::move(shards);
  in_doubt_ = false;
}

std::vector<SnapshotPart> SessionPlacement::MakeParts() const {
  std::vector<SnapshotPart> parts;
  for (const PlacedLayers& placed : shards_) {
    if (!placed.layers.empty()) parts.push_back({.shard = placed.shard, .layers = placed.layers});
  }
  return parts;
}

std::optional<std::string> SessionPlacement::WhyNotHeld(const std::vector<SnapshotPart>& parts) const {
  for (const SnapshotPart& part : parts) {
    const auto placed = std::find_if(shards_.begin(), shards_.end(),
                                     [&](const PlacedLayers& place) { return place.shard == part.shard; });
    if (placed == shards_.end() || placed->layers != part.layers) {
      return absl::StrCat("shard ", part.shard, ": it has other layers by now");
    }
  }
  return std::nullopt;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/policy/placement.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace precondor {
namespace {

int32_t LeastLoadedWithRoom(const std::vector<double>& load, const std::vector<int64_t>& free_bytes, int64_t bytes) {
  int32_t best = -1;
  for (int32_t s = 0; s < static_cast<int32_t>(load.size()); ++s) {
    if (free_bytes[s] < bytes) continue;
    if (best < 0 || load[s] < load[best]) best = s;
  }
  return best;
}

}  // namespace

Placement PlaceLayers(absl::Span<const PlacementLayer> layers, absl::Span<const PlacementShard> shards) {
  Placement placement;
  if (shards.empty()) {
    placement.reason = "there are no shards";
    return placement;
  }
  std::vector<int64_t> free_bytes;
  for (const PlacementShard& shard : shards) {
    free_bytes.push_back(shard.free_bytes);
    placement.load.push_back(shard.load);
  }
  placement.shard_of_layer.assign(layers.size(), -1);

  std::vector<size_t> order(layers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return layers[x].cost > layers[y].cost; });
  for (size_t layer : order) {
    const int32_t shard = LeastLoadedWithRoom(placement.load, free_bytes, layers[layer].bytes);
    if (shard < 0) {
      placement.reason =
          absl::StrCat("layer ", layer, " needs ", layers[layer].bytes, " bytes; the most that any of ", shards.size(),
                       " shards has left is ", *std::max_element(free_bytes.begin(), free_bytes.end()));
      placement.shard_of_layer.clear();
      return placement;
    }
    placement.shard_of_layer[layer] = shard;
    placement.load[shard] += layers[layer].cost;
    free_bytes[shard] -= layers[layer].bytes;
  }
  placement.feasible = true;
  const auto [least, most] = std::minmax_element(placement.load.begin(), placement.load.end());
  placement.reason =
      absl::StrCat(layers.size(), " layers on ", shards.size(), " shards, cost per shard ", *least, " to ", *most);
  return placement;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/policy/placement.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace precondor {
namespace {

class DeviceCapacities {
 public:
  explicit DeviceCapacities(absl::Span<const PlacementShard> shards) {
    for (const PlacementShard& shard : shards) {
      free_bytes_.push_back(shard.free_bytes);
      load_.push_back(shard.load);
    }
  }

  // Returns -1 if no shard has room.
  int32_t LeastLoadedDevice(const PlacementLayer& layer) const {
    int32_t best = -1;
    for (int32_t s = 0; s < static_cast<int32_t>(load_.size()); ++s) {
      if (free_bytes_[s] < layer.bytes) continue;
      if (best < 0 || load_[s] < load_[best]) best = s;
    }
    return best;
  }

  void Put(const PlacementLayer& layer, int32_t owner) {
    load_[owner] += layer.cost;
    free_bytes_[owner] -= layer.bytes;
  }

  const std::vector<double>& load() const { return load_; }
  // Explains why LeastLoadedDevice returned -1.
  std::string NoRoom(size_t index, const PlacementLayer& layer) const {
    return absl::StrCat("layer ", index, " needs ", layer.bytes, " bytes; the most that any of ", load_.size(),
                        " shards has left is ", *std::max_element(free_bytes_.begin(), free_bytes_.end()));
  }

 private:
  std::vector<int64_t> free_bytes_;
  std::vector<double> load_;
};

}  // namespace

Placement PlaceLayers(absl::Span<const PlacementLayer> layers, absl::Span<const PlacementShard> shards) {
  Placement placement;
  if (shards.empty()) {
    placement.reason = "there are no shards";
    return placement;
  }
  DeviceCapacities rooms(shards);
  placement.shard_of_layer.assign(layers.size(), -1);

  std::vector<size_t> order(layers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return layers[x].cost > layers[y].cost; });
  for (size_t layer : order) {
    const int32_t shard = rooms.LeastLoadedDevice(layers[layer]);
    if (shard < 0) {
      placement.reason = rooms.NoRoom(layer, layers[layer]);
      placement.shard_of_layer.clear();
      return placement;
    }
    placement.shard_of_layer[layer] = shard;
    rooms.Put(layers[layer], shard);
  }
  placement.load = rooms.load();
  placement.feasible = true;
  const auto [least, most] = std::minmax_element(placement.load.begin(), placement.load.end());
  placement.reason =
      absl::StrCat(layers.size(), " layers on ", shards.size(), " shards, cost per shard ", *least, " to ", *most);
  return placement;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/policy/placement.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace precondor {
namespace {

class ShardCapacities {
 public:
  explicit ShardCapacities(absl::Span<const PlacementShard> shards) {
    for (const PlacementShard& shard : shards) {
      free_bytes_.push_back(shard.free_bytes);
      load_.push_back(0);
    }
  }

  // Returns -1 if no shard has room.
  int32_t LeastLoaded(const PlacementLayer& layer) const {
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
  // Explains why LeastLoaded returned -1.
  std::string NoRoom(size_t index, absl::Span<const PlacementLayer> layers) const {
    int64_t all = 0;
    for (const PlacementLayer& layer : layers) all += std::min(layer.bytes, std::numeric_limits<int64_t>::max() - all);
    return absl::StrCat("layer ", index, " needs ", layers[index].bytes, " bytes, all ", layers.size(), " layers ", all,
                        "; the most that any of ", load_.size(), " shards has left is ",
                        *std::max_element(free_bytes_.begin(), free_bytes_.end()));
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
  ShardCapacities rooms(shards);
  placement.shard_of_layer.assign(layers.size(), -1);

  std::vector<size_t> order(layers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return layers[x].cost > layers[y].cost; });
  for (size_t layer : order) {
    const int32_t shard = rooms.LeastLoaded(layers[layer]);
    if (shard < 0) {
      placement.reason = rooms.NoRoom(layer, layers);
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

std::vector<uint32_t> DelegateByDevice(const Placement& placement, absl::Span<const PlacementShard> shards,
                                       absl::Span<const std::string> rank_devices) {
  if (rank_devices.empty()) return {};
  std::map<std::string, std::vector<uint32_t>> ranks_on;
  for (size_t rank = 0; rank < rank_devices.size(); ++rank) {
    if (!rank_devices[rank].empty()) ranks_on[rank_devices[rank]].push_back(static_cast<uint32_t>(rank));
  }
  std::vector<uint32_t> delegates;
  std::map<std::string, size_t> delegated;  // number of layers by device
  for (const int32_t shard : placement.shard_of_layer) {
    const std::string& device = shards[static_cast<size_t>(shard)].ring_device;
    const auto ranks = ranks_on.find(device);
    delegates.push_back(ranks == ranks_on.end() ? static_cast<uint32_t>(delegates.size() % rank_devices.size())
                                                : ranks->second[delegated[device]++ % ranks->second.size()]);
  }
  return delegated.empty() ? std::vector<uint32_t>() : delegates;
}

}  // namespace precondor

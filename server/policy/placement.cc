// SPDX-License-Identifier: Apache-2.0
#include "server/policy/placement.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace precondor {
namespace {

// A shard's range of devices: indexes [begin, end).
struct Devices {
  size_t begin = 0, end = 0;
  int count() const { return static_cast<int>(end - begin); }
};

class DeviceCapacities {
 public:
  explicit DeviceCapacities(absl::Span<const PlacementShard> shards) : shards_(shards) {
    for (const PlacementShard& shard : shards) {
      free_bytes_.push_back(shard.free_bytes);
      load_.push_back(shard.load);
    }
  }

  // Returns -1 if no shard has room.
  int32_t LeastLoadedDevice(const PlacementLayer& layer) const {
    int32_t best = -1;
    for (int32_t s = 0; s < static_cast<int32_t>(load_.size()); ++s) {
      if (!HasRoom(layer, s)) continue;
      if (best < 0 || load_[s] < load_[best]) best = s;
    }
    return best;
  }

  void Put(const PlacementLayer& layer, int32_t owner) {
    const Devices devices = Sharing(layer, owner);
    const PlacementLayer::Parts parts = PartsOf(layer, devices);
    for (size_t s = devices.begin; s < devices.end; ++s) {
      load_[s] += layer.cost / devices.count();
      free_bytes_[s] -= static_cast<int32_t>(s) == owner ? parts.own : parts.other;
    }
  }

  const std::vector<double>& load() const { return load_; }
  // Explains why LeastLoadedDevice returned -1.
  std::string NoRoom(size_t index, const PlacementLayer& layer) const {
    std::string needs = absl::StrCat("layer ", index, " needs ", layer.bytes, " bytes");
    Devices most;
    for (int32_t s = 0; s < static_cast<int32_t>(load_.size()); ++s) {
      const Devices devices = Sharing(layer, s);
      if (devices.count() > std::max(1, most.count())) most = devices;
    }
    if (most.count() > 1) {
      const PlacementLayer::Parts parts = PartsOf(layer, most);
      absl::StrAppend(&needs, ", or ", parts.own, " on one and ", parts.other, " on each other of the ", most.count(),
                      " devices of a shard");
    }
    return absl::StrCat(needs, "; the most that any of ", load_.size(), " shards has left is ",
                        *std::max_element(free_bytes_.begin(), free_bytes_.end()));
  }

 private:
  // Returns the devices that would share the layer if `owner` had it.
  Devices Sharing(const PlacementLayer& layer, int32_t owner) const {
    Devices devices{.begin = static_cast<size_t>(owner), .end = static_cast<size_t>(owner) + 1};
    if (layer.parts == nullptr) return devices;
    const size_t shard = shards_[devices.begin].shard;
    while (devices.begin > 0 && shards_[devices.begin - 1].shard == shard) --devices.begin;
    while (devices.end < shards_.size() && shards_[devices.end].shard == shard) ++devices.end;
    return devices;
  }
  static PlacementLayer::Parts PartsOf(const PlacementLayer& layer, const Devices& devices) {
    return devices.count() > 1 ? layer.parts(devices.count()) : PlacementLayer::Parts{.own = layer.bytes, .other = 0};
  }
  bool HasRoom(const PlacementLayer& layer, int32_t owner) const {
    const Devices devices = Sharing(layer, owner);
    const PlacementLayer::Parts parts = PartsOf(layer, devices);
    for (size_t s = devices.begin; s < devices.end; ++s) {
      if (free_bytes_[s] < (static_cast<int32_t>(s) == owner ? parts.own : parts.other)) return false;
    }
    return true;
  }

  const absl::Span<const PlacementShard> shards_;
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

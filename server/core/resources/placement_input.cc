// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/placement_input.h"

#include <map>
#include <string>
#include <tuple>

#include "server/core/resources/cost_table.h"
#include "server/core/resources/reservation.h"

namespace precondor {
namespace {

// Key of a measurement: the method's text, d_out, d_in.
using Shape = std::tuple<std::string, int64_t, int64_t>;

struct Mean {
  double sum = 0;
  int64_t count = 0;
  void Add(double value) {
    sum += value;
    ++count;
  }
  double value() const { return sum / static_cast<double>(count); }
};

// Returns the index of one layer of each method, by the method's text.
std::map<std::string, uint32_t> Examples(const SessionSpec& spec) {
  std::map<std::string, uint32_t> examples;
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer)
    examples.emplace(MethodText(MethodOf(spec, layer)), layer);
  return examples;
}

}  // namespace

std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods,
                                           absl::Span<const MeasuredCost> costs) {
  const std::map<std::string, uint32_t> examples = Examples(spec);
  std::map<Shape, Mean> measured;
  std::map<std::string, Mean> seconds_per_flop;
  Mean any;
  for (const MeasuredCost& cost : costs) {
    const auto example = examples.find(cost.method);
    if (example == examples.end() || !(cost.seconds_per_step > 0)) continue;
    measured[{cost.method, cost.d_out, cost.d_in}].Add(cost.seconds_per_step);
    const uint32_t layer = example->second;
    const LayerSpec shape{.name = "", .d_out = cost.d_out, .d_in = cost.d_in, .has_bias = false};
    const double flops = methods.of(layer).StepFlops(shape, VectorsPerStep(spec, layer));
    if (flops <= 0) continue;
    seconds_per_flop[cost.method].Add(cost.seconds_per_step / flops);
    any.Add(cost.seconds_per_step / flops);
  }
  std::vector<PlacementLayer> layers;
  layers.reserve(spec.layers.size());
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    const LayerSpec& shape = spec.layers[layer];
    const std::string text = MethodText(MethodOf(spec, layer));
    double cost = 0;
    if (const auto found = measured.find({text, shape.d_out, shape.d_in}); found != measured.end()) {
      cost = found->second.value();
    } else {
      const auto own = seconds_per_flop.find(text);
      const double unit = own != seconds_per_flop.end() ? own->second.value() : any.count > 0 ? any.value() : 1.0;
      cost = unit * methods.of(layer).StepFlops(shape, VectorsPerStep(spec, layer));
    }
    layers.push_back({.cost = cost, .bytes = LayerBytes(spec, methods.of(layer), layer, kDefaultWindowSteps)});
  }
  return layers;
}

std::vector<PlacementShard> DeviceRooms(const ShardDescription& shard, double load, size_t place) {
  if (shard.devices.empty()) {
    return {{.free_bytes = shard.capacity_bytes - shard.reserved_bytes, .load = load, .shard = place}};
  }
  std::vector<PlacementShard> rooms;
  for (const DeviceUse& device : shard.devices) {
    rooms.push_back({.free_bytes = device.capacity_bytes - device.reserved_bytes,
                     .load = load / static_cast<double>(shard.devices.size()),
                     .shard = place,
                     .ring_device = device.ring_device});
  }
  return rooms;
}

}  // namespace precondor

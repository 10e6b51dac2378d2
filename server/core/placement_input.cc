// SPDX-License-Identifier: Apache-2.0
#include "server/core/placement_input.h"

#include <map>
#include <utility>

#include "server/core/cost_table.h"
#include "server/core/reservation.h"

namespace precondor {
namespace {

using Shape = std::pair<int64_t, int64_t>;  // d_out, d_in

struct Mean {
  double sum = 0;
  int64_t count = 0;
  double value() const { return sum / static_cast<double>(count); }
};

}  // namespace

std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const Method& method,
                                           absl::Span<const MeasuredCost> costs) {
  const std::string method_text = MethodText(spec.method);
  std::map<Shape, Mean> measured;
  Mean seconds_per_flop;
  for (const MeasuredCost& cost : costs) {
    if (cost.method != method_text || !(cost.seconds_per_step > 0)) continue;
    Mean& mean = measured[{cost.d_out, cost.d_in}];
    mean.sum += cost.seconds_per_step;
    ++mean.count;
    const LayerSpec shape{.name = "", .d_out = cost.d_out, .d_in = cost.d_in, .has_bias = false};
    const double flops = method.StepFlops(shape, VectorsPerStep(spec));
    if (flops <= 0) continue;
    seconds_per_flop.sum += cost.seconds_per_step / flops;
    ++seconds_per_flop.count;
  }
  const double unit = seconds_per_flop.count > 0 ? seconds_per_flop.value() : 1.0;
  std::vector<PlacementLayer> layers;
  layers.reserve(spec.layers.size());
  for (const LayerSpec& layer : spec.layers) {
    const auto found = measured.find({layer.d_out, layer.d_in});
    const double cost =
        found != measured.end() ? found->second.value() : unit * method.StepFlops(layer, VectorsPerStep(spec));
    layers.push_back({.cost = cost, .bytes = LayerBytes(spec, method, layer, kDefaultWindowSteps)});
  }
  return layers;
}

}  // namespace precondor

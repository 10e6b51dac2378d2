// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/placement_input.h"

#include "server/core/resources/reservation.h"

namespace precondor {

std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods) {
  std::vector<PlacementLayer> layers;
  layers.reserve(spec.layers.size());
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    layers.push_back({.cost = methods.of(layer).StepFlops(spec.layers[layer], VectorsPerStep(spec, layer)),
                      .bytes = LayerBytes(spec, methods.of(layer), layer, kDefaultWindowSteps)});
  }
  return layers;
}

}  // namespace precondor

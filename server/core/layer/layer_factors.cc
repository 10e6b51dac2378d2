// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_factors.h"

#include <utility>

#include "server/core/layer/layer_driver.h"

namespace precondor {

void LayerFactors::Set(std::unique_ptr<LayerState> state) {
  // Tasks have to be copyable.
  auto next = std::make_shared<std::unique_ptr<LayerState>>(std::move(state));
  layer_.executor_.Post(layer_.strand_, [layer = layer_.shared_from_this(), next] {
    layer->ApplyPendingUpdates();
    Replace(*layer, std::move(*next));
  });
}

void LayerFactors::Release(std::function<void()> done) {
  layer_.executor_.Post(layer_.strand_, [layer = layer_.shared_from_this(), done = std::move(done)] {
    layer->ApplyPendingUpdates();
    if (layer->worker_.has_factors()) Replace(*layer, nullptr);
    done();
  });
}

void LayerFactors::Replace(LayerDriver& layer, std::unique_ptr<LayerState> state) {
  layer.worker_.SetState(std::move(state));
  layer.journal_.FactorsChanged(layer.worker_.has_factors());
  layer.ShowFactors();
}

void LayerFactors::Restore(std::unique_ptr<LayerState> state, uint64_t step) {
  auto next = std::make_shared<std::unique_ptr<LayerState>>(std::move(state));
  layer_.executor_.Post(layer_.strand_, [layer = layer_.shared_from_this(), next, step] {
    layer->worker_.SetState(std::move(*next));
    layer->journal_.BeginAt(step, layer->worker_);
    layer->ShowFactors();
  });
}

bool LayerFactors::held() const { return layer_.worker_.has_factors(); }

}  // namespace precondor

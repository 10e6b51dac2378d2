// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_factors.h"

#include <utility>

#include "server/core/layer/layer_driver.h"

namespace precondor {

void LayerFactors::Set(std::unique_ptr<LayerState> state, uint64_t eviction_id) {
  // Tasks have to be copyable.
  auto next = std::make_shared<std::unique_ptr<LayerState>>(std::move(state));
  layer_.executor_.Post(layer_.strand_, [layer = layer_.shared_from_this(), next, eviction_id] {
    layer->ApplyPendingUpdates();
    Replace(*layer, std::move(*next), eviction_id);
  });
}

void LayerFactors::Release(uint64_t eviction_id, ReleasedFn done) {
  layer_.executor_.Post(layer_.strand_, [layer = layer_.shared_from_this(), eviction_id, done = std::move(done)] {
    layer->ApplyPendingUpdates();
    if (!layer->worker_.has_factors()) return done(absl::NotFoundError("the layer has no factors"));
    const bool kept = layer->session_->shard->options.journal != nullptr;
    absl::StatusOr<std::string> state =
        kept ? layer->worker_.Save() : absl::NotFoundError("there is no data directory");
    Replace(*layer, nullptr, kept ? eviction_id : 0);
    done(std::move(state));
  });
}

void LayerFactors::Replace(LayerDriver& layer, std::unique_ptr<LayerState> state, uint64_t eviction_id) {
  layer.worker_.SetState(std::move(state));
  layer.journal_.FactorsChanged(layer.worker_.has_factors(), eviction_id);
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

uint64_t LayerFactors::eviction_id() const { return layer_.journal_.eviction_id(); }

}  // namespace precondor

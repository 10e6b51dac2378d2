// SPDX-License-Identifier: Apache-2.0
// Sets, releases and restores the factors of a layer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

class LayerDriver;

// A view of a layer for changes of its factors other than updates. The layer must outlive the view. Thread-safe.
// Changes happen on the layer's strand, after the work that is queued there, and are recorded in the journal.
class LayerFactors {
 public:
  explicit LayerFactors(LayerDriver& layer) : layer_(layer) {}

  // Gives factors to a layer that has none: those of `eviction_id`, or fresh ones if it is 0.
  void Set(std::unique_ptr<LayerState> state, uint64_t eviction_id);
  // Takes the layer's factors away, then calls `done` on the strand with the result of LayerState::Save. `done` gets
  // NotFound if the layer has no factors, or if there is no journal that could keep them.
  using ReleasedFn = std::function<void(absl::StatusOr<std::string> state)>;
  void Release(uint64_t eviction_id, ReleasedFn done);
  // Gives a layer that has had no contribution the factors of a snapshot as of `step`, and its image to the journal.
  void Restore(std::unique_ptr<LayerState> state, uint64_t step);

  // Precondition of held() and eviction_id(): no Set or Release is under way.
  bool held() const;
  // Returns the eviction that last took the layer's factors, also if they have been given back. 0 means that no factors
  // were kept.
  uint64_t eviction_id() const;

 private:
  // Runs on the strand.
  static void Replace(LayerDriver& layer, std::unique_ptr<LayerState> state, uint64_t eviction_id);

  LayerDriver& layer_;
};

}  // namespace precondor

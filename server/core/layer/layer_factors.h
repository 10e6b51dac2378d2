// SPDX-License-Identifier: Apache-2.0
// Sets, releases and restores the factors of a layer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/methods/method.h"

namespace precondor {

class LayerDriver;

// A view of a layer for changes of its factors other than updates. The layer must outlive the view. Thread-safe.
// Changes happen on the layer's strand, after the work that is queued there, and are recorded in the journal.
class LayerFactors {
 public:
  explicit LayerFactors(LayerDriver& layer) : layer_(layer) {}

  // Gives factors to a layer that has none.
  void Set(std::unique_ptr<LayerState> state);
  // Drops the layer's factors, then calls `done` on the strand.
  void Release(std::function<void()> done);
  // Gives a layer that has had no contribution the factors of a snapshot as of `step`, and its image to the journal.
  void Restore(std::unique_ptr<LayerState> state, uint64_t step);

  // Precondition: no Set or Release is under way.
  bool held() const;

 private:
  // Runs on the strand.
  static void Replace(LayerDriver& layer, std::unique_ptr<LayerState> state);

  LayerDriver& layer_;
};

}  // namespace precondor

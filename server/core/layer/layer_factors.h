// SPDX-License-Identifier: Apache-2.0
// How the factors of a layer come and go, besides by updates.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "kernels/methods/method.h"

namespace precondor {

class LayerDriver;

// A view of a layer, which outlives it. Thread-safe. Changes happen on the layer's strand, after what is queued there,
// and are recorded.
class LayerFactors {
 public:
  explicit LayerFactors(LayerDriver& layer) : layer_(layer) {}

  // Gives a layer that has no factors some: those of `eviction_id`, or, with 0, fresh ones.
  void Set(std::unique_ptr<LayerState> state, uint64_t eviction_id);
  // Takes the layer's factors away, then calls `done` on the strand with what LayerState::Save said of them, or
  // NotFound: there is no journal that could keep them.
  using ReleasedFn = std::function<void(absl::StatusOr<std::string> state)>;
  void Release(uint64_t eviction_id, ReleasedFn done);
  // Gives a layer that has had no contribution the factors of a snapshot as of `step`; its image goes to the journal.
  void Restore(std::unique_ptr<LayerState> state, uint64_t step);

  // Neither while Set or Release may be under way.
  bool held() const;
  // The eviction in which the layer's factors went last, whether they are back or not; 0: none was kept.
  uint64_t eviction_id() const;

 private:
  // On the strand.
  static void Replace(LayerDriver& layer, std::unique_ptr<LayerState> state, uint64_t eviction_id);

  LayerDriver& layer_;
};

}  // namespace precondor

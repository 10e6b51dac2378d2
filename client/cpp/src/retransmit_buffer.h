// SPDX-License-Identifier: Apache-2.0
// Keeps contributions that a shard has answered and may need again. A shard that restarts knows which steps it had
// applied, but does not have the contributions of a step for which another rank still waits.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>

#include "client/cpp/src/contribution.h"

namespace precondor {

// Holds contributions by their place in the sending order. A gradient is dropped when a gradient of the same layer is
// answered that this rank submitted after it had received the first answer. All ranks submit in the same order, so
// every rank has the first answer by then. Statistics are dropped together with their step's gradient, or after a few
// statistic steps if this rank sends no gradient for the layer. Not thread-safe.
class RetransmitBuffer {
 public:
  using Item = std::shared_ptr<const Contribution>;
  using Sequence = int64_t;

  // Keeps acknowledged statistics.
  void KeepStatistics(Sequence sequence, Item item);
  // Keeps an answered gradient. `next` is the sequence of the next submission. `item` owns its bytes and has no answer
  // outstanding.
  void KeepGradient(Sequence sequence, Item item, Sequence next);
  // Drops the contributions that no rank can need after this answer to a gradient.
  void OnAnswer(const ContributionId& id, Sequence sequence, Sequence next);
  // If the layer has a contribution of this kind for this step or a later one, the job has rolled back: drops the
  // layer's contributions of this step and later.
  void OnSubmit(const ContributionId& id);

  // Drops the contributions of all steps before `step`.
  void DropBefore(uint64_t step);

  // The lowest step for which a gradient of the layer is held; nullopt if there is none.
  std::optional<uint64_t> FirstGradient(uint32_t layer) const;

  // Moves the contributions of some layers out, so that the buffer of another link can hold them.
  struct Taken {
    Item item;
    std::optional<Sequence> answered_at;
  };
  std::map<Sequence, Taken> TakeLayers(const std::set<uint32_t>& layers);
  void Put(Sequence sequence, Taken taken);

  const std::map<Sequence, Item>& items() const { return items_; }
  void Clear();

 private:
  struct Layer {
    // By item: sequence of the next submission when its step was answered. Nullopt: not known to be answered.
    std::map<Sequence, std::optional<Sequence>> answered_at;
  };
  void Erase(Layer& layer, Sequence sequence);

  std::map<Sequence, Item> items_;
  std::map<uint32_t, Layer> layers_;
};

}  // namespace precondor

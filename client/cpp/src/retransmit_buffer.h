// SPDX-License-Identifier: Apache-2.0
// Contributions that a shard has answered and may need again. A shard that was lost and restarted knows which steps it
// had applied, but it does not have the contributions of a step that another rank still waits for.
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

  void KeepStatistics(Sequence sequence, Item item);
  // Records that the gradient was answered. `next` is the sequence of the next submission. `item` owns its bytes and
  // has no answer outstanding.
  void KeepGradient(Sequence sequence, Item item, Sequence next);
  // A gradient was answered. Drops the contributions that no rank can need after this answer.
  void OnAnswer(const ContributionId& id, Sequence sequence, Sequence next);
  // Drops contributions of steps later than the submitted one: the job has gone back to an earlier step.
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
    std::map<Sequence, std::optional<Sequence>> answered_at;  // by item; nullopt: not known to be answered
  };
  void Erase(Layer& layer, Sequence sequence);

  std::map<Sequence, Item> items_;
  std::map<uint32_t, Layer> layers_;
};

}  // namespace precondor

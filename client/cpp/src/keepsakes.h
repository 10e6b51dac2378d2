// SPDX-License-Identifier: Apache-2.0
// What has been answered and may be needed again: a shard that was lost and came back knows what it had applied, but
// not the contributions of a step that some other rank has no answer of yet.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>

#include "client/cpp/src/contribution.h"

namespace precondor {

// Contributions by their place in the sending order. A gradient stays until another gradient of its layer is answered
// that was submitted after the first one's answer had come: all ranks work in the same order, so that every rank has
// the first answer by then. Statistics stay as long as their step's gradient; where this rank sends none, for a few
// statistic steps. One thread at a time.
class Keepsakes {
 public:
  using Item = std::shared_ptr<const Contribution>;
  using Sequence = int64_t;

  void KeepStatistics(Sequence sequence, Item item);
  // The gradient's answer has come; `next` is the sequence of the next submission. `item` owns its bytes and waits for
  // nothing.
  void KeepGradient(Sequence sequence, Item item, Sequence next);
  // A gradient was answered: what it shows nobody to need any more goes.
  void OnAnswer(const ContributionId& id, Sequence sequence, Sequence next);
  // A submission shows that the job has gone back to an earlier step: what was kept of later ones goes.
  void OnSubmit(const ContributionId& id);

  // What is kept of steps before this one goes.
  void DropBefore(uint64_t step);

  // The lowest step whose gradient of the layer is kept.
  std::optional<uint64_t> FirstGradient(uint32_t layer) const;

  // What is kept of some layers, to be kept elsewhere.
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

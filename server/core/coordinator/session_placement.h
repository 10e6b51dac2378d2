// SPDX-License-Identifier: Apache-2.0
// Which shard has which layers of a session.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/core/coordinator/coordinator_journal.h"

namespace precondor {

// Not thread-safe. A move of layers is written down by the caller before it is adopted.
class SessionPlacement {
 public:
  // `shards` has one entry for each shard of the coordinator, in its order; a shard without layers has an empty one.
  explicit SessionPlacement(std::vector<PlacedLayers> shards) : shards_(std::move(shards)) {}

  const std::vector<PlacedLayers>& shards() const { return shards_; }
  // Says where the layers are for certain.
  void Adopt(std::vector<PlacedLayers> shards);

  // A move may or may not have been written down: the next record has to say where the layers are.
  bool in_doubt() const { return in_doubt_; }
  void NoteInDoubt() { in_doubt_ = true; }

  // The parts of a snapshot of all layers, none durable.
  std::vector<SnapshotPart> MakeParts() const;
  // Why shards cannot take these parts any more; nullopt: each has the part's layers.
  std::optional<std::string> WhyNotHeld(const std::vector<SnapshotPart>& parts) const;

 private:
  std::vector<PlacedLayers> shards_;
  bool in_doubt_ = false;
};

}  // namespace precondor

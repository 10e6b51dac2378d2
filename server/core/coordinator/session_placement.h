// SPDX-License-Identifier: Apache-2.0
// The shard of each layer of a session.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/core/coordinator/coordinator_journal.h"

namespace precondor {

// The caller writes a new placement before it adopts it. Not thread-safe.
class SessionPlacement {
 public:
  // `shards` has one entry for each shard of the coordinator, in its order, without layers if the shard has none.
  explicit SessionPlacement(std::vector<PlacedLayers> shards) : shards_(std::move(shards)) {}

  const std::vector<PlacedLayers>& shards() const { return shards_; }
  // Adopts a placement that is durable.
  void Adopt(std::vector<PlacedLayers> shards);

  // Returns whether a move may or may not have been written. The next record must then contain the placement.
  bool in_doubt() const { return in_doubt_; }
  void NoteInDoubt() { in_doubt_ = true; }

  // Returns the parts of a snapshot of all layers, none of them durable.
  std::vector<SnapshotPart> MakeParts() const;
  // Returns why the shards can no longer take these parts, or nullopt if each still has the layers of its part.
  std::optional<std::string> WhyNotHeld(const std::vector<SnapshotPart>& parts) const;

 private:
  std::vector<PlacedLayers> shards_;
  bool in_doubt_ = false;
};

}  // namespace precondor

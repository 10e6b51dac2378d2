// SPDX-License-Identifier: Apache-2.0
// Snapshots that a coordinator or an operator asks a shard for, and layers that begin with the factors of one.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/shard/serving_state.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_journal.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe. Every call is Unavailable while the shard comes back from its journal.
class SnapshotRequests {
 public:
  // All references outlive it.
  SnapshotRequests(ShardContext& shard, const ShardSessions& sessions, const ServingState& serving)
      : shard_(shard), sessions_(sessions), serving_(serving) {}

  // See ShardControl::TakeSnapshot.
  absl::StatusOr<SnapshotProgress> Take(const SnapshotOrder& order);

  // Has the session's layers give images for a snapshot as of `step`. NotFound; FailedPrecondition without a journal;
  // InvalidArgument: the step has been begun.
  absl::Status Request(absl::string_view session_name, uint64_t step);

  // Gives a layer of a session that no rank has joined the factors of an image, as of `step`; one without factors
  // leaves it fresh ones. With the last layer of those that an order of the coordinator waits for, the part is taken.
  // Errors, and nothing has changed: NotFound UNKNOWN_SESSION, FailedPrecondition when it is in use, holds no factors
  // or has not the layer here, those of LayerState::Load.
  absl::Status RestoreLayer(const LayerImage& image);
  // Upper bound of the state in an image that RestoreLayer can take for this layer. The errors of RestoreLayer but for
  // those of LayerState::Load.
  absl::StatusOr<uint64_t> RestorableBytes(uint64_t session_id, uint32_t layer) const;

 private:
  // A session that no worker has joined, that holds factors and has the layer here; the errors of RestoreLayer.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindRestorable(uint64_t session_id, uint32_t layer) const;

  ShardContext& shard_;
  const ShardSessions& sessions_;
  const ServingState& serving_;
};

}  // namespace precondor

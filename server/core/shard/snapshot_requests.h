// SPDX-License-Identifier: Apache-2.0
// Snapshots that a coordinator orders, and layers that begin with the factors of a snapshot.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/api/session_access.h"
#include "server/core/api/shard_control.h"
#include "server/core/api/shard_journal.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe. Every call returns UNAVAILABLE while the shard replays its journal.
class SnapshotRequests {
 public:
  // All references must outlive the object.
  SnapshotRequests(ShardContext& shard, const ShardSessions& sessions, const ServingState& serving)
      : shard_(shard), sessions_(sessions), serving_(serving) {}

  // See ShardControl::TakeSnapshot.
  absl::StatusOr<SnapshotProgress> Take(const SnapshotOrder& order);

  // Gives a layer the factors of an image as of `at.step`, or fresh factors if the image has none. Precondition: no
  // rank has joined the session. If the coordinator has ordered a restore, the last layer completes the shard's part.
  // Does nothing if the layer has been restored before.
  // Errors change nothing: NOT_FOUND (UNKNOWN_SESSION), FAILED_PRECONDITION if the session is in use or does not
  // have the layer here (NOT_OWNER), UNAVAILABLE (NOT_ACTIVE) while another call restores the layer, and the errors of
  // LayerState::Load.
  absl::Status RestoreLayer(const LayerImage& image);
  // Returns an upper bound of the saved state's bytes in an image for this layer. Returns PERMISSION_DENIED if `caller`
  // does not show the session's secret, and the errors of RestoreLayer except those of LayerState::Load.
  absl::StatusOr<uint64_t> RestorableBytes(uint64_t session_id, uint32_t layer, const SessionCaller& caller) const;

 private:
  // Returns the session if the layer can be restored, else the errors of RestoreLayer.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindRestorable(uint64_t session_id, uint32_t layer) const;
  // Take of a shard without a journal: only a restored part can be complete, and it is in memory.
  absl::StatusOr<SnapshotProgress> TakeInMemory(const SnapshotOrder& order, const ShardSession& session) const;

  ShardContext& shard_;
  const ShardSessions& sessions_;
  const ServingState& serving_;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Quarantine: sessions that no coordinator knows. They are not in memory, but the journal keeps them until they are
// restored, deleted, or their time is over.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/api/shard_control.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

class ShardReplay;

// Moves sessions to and from quarantine. ShardSessions has their states, the journal their data. Thread-safe.
class ShardQuarantine {
 public:
  // All references must outlive the object.
  ShardQuarantine(ShardContext& shard, ShardSessions& sessions, const ServingState& serving)
      : shard_(shard), sessions_(sessions), serving_(serving) {}

  // See ShardControl::Quarantine. Removes the session if the journal has no quarantine.
  absl::StatusOr<bool> Put(uint64_t session_id);
  // Puts an older session with the install's name in quarantine. Returns FAILED_PRECONDITION (STALE_EPOCH) if a newer
  // session has the name.
  absl::Status ReplaceSameNameSession(const SessionInstall& install);
  // Restores a session from quarantine through `replay`. Returns true if it did; ShardSessions::Find does not return
  // the session before the caller calls ShardSessions::Release. Returns false if the session is not in quarantine.
  // After an error it is still there.
  absl::StatusOr<bool> BringBack(uint64_t session_id, ShardReplay& replay);
  // Deletes a session from quarantine. Returns false if it is not in quarantine.
  absl::StatusOr<bool> Delete(uint64_t session_id);
  // Writes sessions to quarantine once all work on them has ended, and deletes those whose time is over.
  void Complete();

 private:
  absl::StatusOr<bool> Take(uint64_t session_id, bool even_with_gaps);
  absl::Status ReturnClaimed(uint64_t session_id, ShardReplay& replay);

  ShardContext& shard_;
  ShardSessions& sessions_;
  const ServingState& serving_;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Sessions that no coordinator knows: out of memory, but kept by the journal until one is brought back or its time
// ends.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/shard/serving_state.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

class ShardReplay;

// Thread-safe. Which sessions are there is in ShardSessions; the journal has what they consist of.
class ShardQuarantine {
 public:
  // All references outlive it.
  ShardQuarantine(ShardContext& shard, ShardSessions& sessions, const ServingState& serving)
      : shard_(shard), sessions_(sessions), serving_(serving) {}

  // See ShardControl::Quarantine. Where the journal has no quarantine the session is removed.
  absl::StatusOr<bool> Put(uint64_t session_id);
  // Puts an older session of the install's name there. FailedPrecondition STALE_EPOCH: a newer one has it.
  absl::Status ReplaceSameNameSession(const SessionInstall& install);
  // Brings a session back that is there, by `replay`. True: it was there, and Find does not see it until
  // ShardSessions::Release. Otherwise it is there still, or was not.
  absl::StatusOr<bool> BringBack(uint64_t session_id, ShardReplay& replay);
  // Deletes a session that is there. False: it is not.
  absl::StatusOr<bool> Delete(uint64_t session_id);
  absl::StatusOr<std::vector<QuarantinedSession>> List() const;
  // Has sessions written down as quarantined whose work has ended, and deletes those whose time is over.
  void Complete();

 private:
  absl::StatusOr<bool> Take(uint64_t session_id, bool even_with_gaps);
  absl::Status ReturnClaimed(uint64_t session_id, ShardReplay& replay);

  ShardContext& shard_;
  ShardSessions& sessions_;
  const ServingState& serving_;
};

}  // namespace precondor

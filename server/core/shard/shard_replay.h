// SPDX-License-Identifier: Apache-2.0
// Restores a shard from its journal, or one session from quarantine. server/recovery reads the records.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

#include "kernels/base/mutex.h"
#include "server/core/api/shard_journal.h"
#include "server/core/shard/fencing_gate.h"
#include "server/core/shard/session_installer.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

class LayerDriver;

// At start, one thread calls everything from Begin to Finish before other calls reach the shard. Later, the thread that
// has claimed a session in quarantine uses it in ShardJournal::Return. mu_ is a leaf lock.
class ShardReplay {
 public:
  // All references must outlive the object.
  ShardReplay(ShardContext& shard, ShardSessions& sessions, SessionInstaller& installer, FencingGate& gate,
              ServingState& serving)
      : shard_(shard), sessions_(sessions), installer_(installer), gate_(gate), serving_(serving) {}

  // Makes all other calls on the shard UNAVAILABLE until Finish.
  void Begin() { serving_.BeginReplay(); }
  // Restores the greatest fencing token that was remembered.
  void RestoreLeader(uint64_t token) { gate_.Restore(token); }
  // Applies a record. Records come in the order in which they were written. An install record installs the session or
  // changes its members and layers; an older install changes nothing. A record of a removal or of a quarantine takes
  // the session out. Records of sessions that are not installed are ignored. A session that cannot be restored exactly
  // is logged and removed, and Finish returns it. A session for which there is no memory is neither installed nor
  // removed; see status().
  void Add(ShardRecord record);
  // Applies a gradient of the journal. Precondition: every other record has been added. See LayerReplay::Add.
  void Add(GradientRecord record);
  // Loads a layer's image from a snapshot. Precondition: Add has installed the session and has applied no other record
  // of it.
  void Load(const LayerImage& image);
  // Returns RESOURCE_EXHAUSTED (CAPACITY) if there is no memory for some session. Its records must then stay as they
  // are, so that the session can be restored with more memory.
  absl::Status status() const;
  // Returns the result of the replay of a session that ShardJournal::Return restores, and forgets an error.
  absl::Status CheckReturned(uint64_t session_id);
  // Returns whether the session is in quarantine, or moving to or from it.
  bool IsQuarantined(uint64_t session_id) const { return sessions_.IsQuarantined(session_id); }
  // Ends the replay and lets the shard take calls. Precondition: status() is OK. Returns the sessions that were given
  // up.
  std::vector<uint64_t> Finish();

 private:
  void AddInstall(const SessionInstall& install);
  void ReplayLayer(const LayerStep& at, absl::FunctionRef<absl::Status(LayerDriver&)> apply);
  bool IsGivenUp(uint64_t session_id) const;
  void GiveUp(uint64_t session_id, const absl::Status& why);
  // Records that there is no memory for the session.
  void LeaveStored(uint64_t session_id, const absl::Status& why);

  ShardContext& shard_;
  ShardSessions& sessions_;
  SessionInstaller& installer_;
  FencingGate& gate_;
  ServingState& serving_;

  mutable Mutex mu_;
  absl::flat_hash_set<uint64_t> given_up_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, absl::Status> no_room_ ABSL_GUARDED_BY(mu_);  // errors by session
};

}  // namespace precondor

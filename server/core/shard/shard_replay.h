// SPDX-License-Identifier: Apache-2.0
// How a shard comes back from its journal, and a session from quarantine. server/recovery has the records.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

#include "kernels/base/mutex.h"
#include "server/core/fencing_gate.h"
#include "server/core/shard/serving_state.h"
#include "server/core/shard/session_installer.h"
#include "server/core/shard/shard_journal.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

class LayerDriver;

// From Begin to Finish on one thread, before the shard is asked anything. Later, for a session that
// ShardJournal::Return brings back, on the thread that claimed the session. mu_ is a leaf.
class ShardReplay {
 public:
  // All references outlive it.
  ShardReplay(ShardContext& shard, ShardSessions& sessions, SessionInstaller& installer, FencingGate& gate,
              ServingState& serving)
      : shard_(shard), sessions_(sessions), installer_(installer), gate_(gate), serving_(serving) {}

  // From here to Finish whatever else is asked of the shard is Unavailable.
  void Begin() { serving_.BeginReplay(); }
  // The greatest fencing token that was remembered.
  void RestoreLeader(uint64_t token) { gate_.Restore(token); }
  // The session's membership and layers are those of `record`, as Install says; a removed one is gone. Records come in
  // the order in which they were written, those of sessions that are not here are passed over, and an older install
  // changes nothing. A session that cannot come back exactly is given up, logged and removed; one that
  // there is no room for is neither here nor removed.
  void Add(ShardRecord record);
  // What a snapshot has of a session that Add has installed, before any other record of it.
  void Load(const LayerImage& image);
  // ResourceExhausted CAPACITY: there is no room for a session that has to come back. Its records have to stay as they
  // are: with more memory or devices it comes back from them.
  absl::Status status() const;
  // What has become of the replay of a session that ShardJournal::Return brings back; a bad end is forgotten with it.
  absl::Status CheckReturned(uint64_t session_id);
  // The session is in quarantine, or on its way there or back.
  bool IsQuarantined(uint64_t session_id) const { return sessions_.IsQuarantined(session_id); }
  // Steps may go on: not unless status() is OK. Returns the sessions that were given up.
  std::vector<uint64_t> Finish();

 private:
  void AddInstall(const SessionInstall& install);
  void ReplayLayer(const LayerStep& at, absl::FunctionRef<absl::Status(LayerDriver&)> apply);
  bool IsGivenUp(uint64_t session_id) const;
  void GiveUp(uint64_t session_id, const absl::Status& why);
  // There is no room for the session.
  void LeaveStored(uint64_t session_id, const absl::Status& why);

  ShardContext& shard_;
  ShardSessions& sessions_;
  SessionInstaller& installer_;
  FencingGate& gate_;
  ServingState& serving_;

  mutable Mutex mu_;
  absl::flat_hash_set<uint64_t> given_up_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, absl::Status> no_room_ ABSL_GUARDED_BY(mu_);  // by session
};

}  // namespace precondor

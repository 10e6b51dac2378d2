// SPDX-License-Identifier: Apache-2.0
// A shard's journal on a disk: a log of records, snapshots that bound the log, and the quarantine.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/api/shard_journal.h"
#include "server/core/shard/shard.h"
#include "server/recovery/gradient_log.h"
#include "server/recovery/quarantine.h"
#include "server/recovery/shard_log.h"
#include "server/recovery/shard_snapshots.h"

namespace precondor::recovery {

// Implements ShardJournal with files in `<data_dir>/shard`. Thread-safe.
class ShardStore final : public ShardJournal {
 public:
  // Lifetime: all references outlive this object.
  ShardStore(store::FileSystem& fs, const std::string& data_dir, ShardLogOptions options, const Clock& clock,
             Logger& logger, StoreObserver& observer, const GradientLogOptions& gradient_options = {});

  // Recovers the sessions on the disk into a shard. Precondition: the shard uses this journal, and ShardReplay::Begin
  // was called. Calls ShardReplay::Finish if it succeeds. Returns DATA_LOSS with file and offset if a file is damaged,
  // RESOURCE_EXHAUSTED (CAPACITY) if the sessions do not fit into the shard's memory, or the disk's errors.
  absl::Status Restore(Shard& shard);

  void Append(const ShardRecord& record) override;
  bool AppendGradient(const GradientRecord& record) override;
  std::optional<absl::Time> LacksGradientsSince(uint64_t session_id) const override {
    return gradients_.LacksSince(session_id);
  }
  void Sync() override { log_.Sync(); }
  absl::Status RememberLeader(uint64_t token) override;
  void Keep(LayerImage image) override;
  bool FinishSnapshots(absl::Time deadline) override {
    snapshots_.GiveUpIncomplete();
    return snapshots_.WaitIdle(deadline);
  }
  bool HoldsAllOf(uint64_t session_id) const override {
    return !log_.stale(session_id) && !gradients_.LacksSince(session_id).has_value();
  }
  void Expect(const SnapshotOrder& order) override { snapshots_.Expect(order); }
  absl::StatusOr<std::optional<SnapshotProgress>> ProgressOf(const SnapshotOrder& order) override {
    return snapshots_.ProgressOf(order);
  }

  absl::Status CheckQuarantine(uint64_t session_id) override;
  absl::Status Quarantine(uint64_t session_id, uint64_t last_step) override;
  std::vector<QuarantinedSession> ListQuarantined() const override { return quarantine_.List(); }
  absl::Status Return(uint64_t session_id, ShardReplay& replay) override;
  absl::StatusOr<bool> DeleteQuarantined(uint64_t session_id) override;
  std::vector<uint64_t> AgeQuarantined(absl::Duration most) override { return quarantine_.Age(most); }

  ShardLog& log() { return log_; }
  GradientLog& gradients() { return gradients_; }
  ShardSnapshots& snapshots() { return snapshots_; }

 private:
  // Returns the greatest fencing token on the disk, or 0 if there is none. Returns DATA_LOSS if the file is damaged.
  absl::StatusOr<uint64_t> ReadLeader() const;
  // Drops what a durable snapshot makes unnecessary. `sequence`: see ShardSnapshots::Durable.
  void OnDurable(const SnapshotImages& snapshot, uint64_t sequence);
  // Passes the session's records in the quarantine to `replay`. The session's records in the log are those from
  // `needed_from` on.
  absl::Status ReplayQuarantined(uint64_t session_id, uint64_t needed_from,
                                 absl::FunctionRef<void(ShardRecord)> replay);
  // Passes its gradients there to `replay`, but those that the session's snapshot at sequence `snapshot_at` has.
  absl::Status ReplayQuarantinedGradients(uint64_t session_id, uint64_t snapshot_at, ShardReplay& replay);

  // How a session left the shard's memory according to the log. If the session was removed and installed again, its
  // later records follow `removed_at`.
  struct End {
    uint64_t removed_at = 0;      // sequence of its last remove record; 0 means none
    uint64_t snapshot_at = 0;     // sequence at which the snapshot begins that the restart uses; 0 means none
    uint64_t quarantined_at = 0;  // sequence of the record that moved it to the quarantine; 0 if it is not in it
    uint64_t last_step = 0;       // of that record
  };
  using Ends = std::map<uint64_t, End>;  // by session
  // Scans the log for the sessions' ends. Removes the quarantine directories of removed sessions.
  absl::StatusOr<Ends> FindEnds();
  // Opens the log of gradients and passes those of the shard's sessions to its replay.
  absl::Status ReplayGradients(Shard& shard, Ends& ends);

  store::FileSystem& fs_;
  const std::string dir_;
  Logger& logger_;
  std::unique_ptr<store::FileLock> lock_;
  recovery::Quarantine quarantine_;
  ShardLog log_;
  GradientLog gradients_;
  ShardSnapshots snapshots_;  // last: its thread calls the others
};

}  // namespace precondor::recovery

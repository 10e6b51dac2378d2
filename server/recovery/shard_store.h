// SPDX-License-Identifier: Apache-2.0
// A shard's journal on a disk: a log of records, snapshots that bound it, and factors that were released.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/shard/shard.h"
#include "server/core/shard/shard_journal.h"
#include "server/recovery/kept_factors.h"
#include "server/recovery/quarantine.h"
#include "server/recovery/shard_log.h"
#include "server/recovery/shard_snapshots.h"

namespace precondor::recovery {

// Thread-safe. Files lie in `<data_dir>/shard`.
class ShardStore final : public ShardJournal {
 public:
  // All references outlive it.
  ShardStore(store::FileSystem& fs, std::string data_dir, ShardLogOptions options, const Clock& clock, Logger& logger,
             StoreObserver& observer);

  // Brings back what is on the disk into a shard that has this journal and awaits it (ShardReplay::Begin). Errors: the
  // disk's, or DataLoss with file and offset.
  absl::Status Restore(Shard& shard);

  void Append(const ShardRecord& record) override;
  void Sync() override { log_.Sync(); }
  absl::Status RememberLeader(uint64_t token) override;
  void Keep(LayerImage image) override;
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

  void KeepFactors(ReleasedFactors factors) override;
  bool FactorsKept(uint64_t session_id, uint64_t eviction_id) override { return kept_.Kept(session_id, eviction_id); }
  absl::StatusOr<std::string> ReadFactors(uint64_t session_id, uint64_t eviction_id, uint32_t layer) override {
    return kept_.Read(session_id, eviction_id, layer);
  }

  ShardLog& log() { return log_; }
  ShardSnapshots& snapshots() { return snapshots_; }

 private:
  // 0: none has been remembered. DataLoss: the file is damaged.
  absl::StatusOr<uint64_t> ReadLeader() const;
  KeptFactors::Options KeptOptions(absl::Duration retry);
  // A snapshot must not outlive factors that it counts on.
  absl::Status Check(const SnapshotImages& snapshot) const;
  void OnDurable(const SnapshotImages& snapshot, uint64_t sequence);
  // Hands over what the quarantine has of a session, whose records in the log are those from `needed_from` on.
  absl::Status ReplayQuarantined(uint64_t session_id, uint64_t needed_from,
                                 absl::FunctionRef<void(ShardRecord)> replay);

  // What the log says of where a session has gone; 0: nothing. A later one of its life is in records after
  // `removed_at`.
  struct End {
    uint64_t removed_at = 0;
    uint64_t quarantined_at = 0;
    uint64_t last_step = 0;
  };
  using Ends = std::map<uint64_t, End>;  // by session
  absl::StatusOr<Ends> FindEnds();

  store::FileSystem& fs_;
  const std::string dir_;
  const Clock& clock_;
  Logger& logger_;
  std::unique_ptr<store::FileLock> lock_;
  recovery::Quarantine quarantine_;
  ShardLog log_;
  KeptFactors kept_;
  ShardSnapshots snapshots_;  // its thread calls log_ and kept_
};

}  // namespace precondor::recovery

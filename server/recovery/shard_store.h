// SPDX-License-Identifier: Apache-2.0
// A shard's journal on a disk: a log of records, and snapshots that bound it.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "server/core/shard.h"
#include "server/core/shard_journal.h"
#include "server/recovery/shard_log.h"
#include "server/recovery/shard_snapshots.h"

namespace precondor::recovery {

// Thread-safe. Files lie in `<data_dir>/shard`.
class ShardStore final : public ShardJournal {
 public:
  // All references outlive it.
  ShardStore(store::FileSystem& fs, std::string data_dir, ShardLogOptions options, const Clock& clock, Logger& logger,
             Observer& observer);

  // Brings back what is on the disk into a shard that has this journal and awaits it (Shard::AwaitReplay). Errors: the
  // disk's, or DataLoss with file and offset.
  absl::Status Restore(Shard& shard);

  void Append(const ShardRecord& record) override;
  void Sync() override { log_.Sync(); }
  void Keep(LayerImage image) override;
  void Expect(const SnapshotOrder& order) override { snapshots_.Expect(order); }
  absl::StatusOr<std::optional<SnapshotProgress>> ProgressOf(const SnapshotOrder& order) override {
    return snapshots_.ProgressOf(order);
  }

  ShardLog& log() { return log_; }
  ShardSnapshots& snapshots() { return snapshots_; }

 private:
  void OnDurable(const SessionSnapshot& snapshot, uint64_t sequence);

  store::FileSystem& fs_;
  const std::string dir_;
  ShardLog log_;
  ShardSnapshots snapshots_;  // its thread calls log_
};

}  // namespace precondor::recovery

// SPDX-License-Identifier: Apache-2.0
// A shard's journal on a disk: a log of records.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "server/core/shard.h"
#include "server/core/shard_journal.h"
#include "server/recovery/shard_log.h"

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

  void Append(const ShardRecord& record) override { log_.Append(record); }
  void Keep(LayerImage image) override {}

  ShardLog& log() { return log_; }

 private:
  store::FileSystem& fs_;
  const std::string dir_;
  ShardLog log_;
};

}  // namespace precondor::recovery

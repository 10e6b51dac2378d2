// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/shard_store.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor::recovery {

ShardStore::ShardStore(store::FileSystem& fs, std::string data_dir, ShardLogOptions options, const Clock& clock,
                       Logger& logger, Observer& observer)
    : fs_(fs),
      dir_(store::JoinPath(data_dir, "shard")),
      log_(fs, store::JoinPath(dir_, "log"), options, clock, logger, observer) {}

absl::Status ShardStore::Restore(Shard& shard) {
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, store::ParentDir(dir_)));
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, dir_));
  PRECONDOR_RETURN_IF_ERROR(log_.Open([&shard](ShardRecord record) { shard.Replay(std::move(record)); }));
  shard.FinishReplay();
  return absl::OkStatus();
}

}  // namespace precondor::recovery

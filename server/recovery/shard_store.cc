// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/shard_store.h"

#include <set>
#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor::recovery {

ShardStore::ShardStore(store::FileSystem& fs, std::string data_dir, ShardLogOptions options, const Clock& clock,
                       Logger& logger, Observer& observer)
    : fs_(fs),
      dir_(store::JoinPath(data_dir, "shard")),
      log_(fs, store::JoinPath(dir_, "log"), options, clock, logger, observer),
      snapshots_(fs, store::JoinPath(dir_, "snapshots"), logger, observer, options.background) {}

absl::Status ShardStore::Restore(Shard& shard) {
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, store::ParentDir(dir_)));
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, dir_));
  std::set<uint64_t> held;
  const auto restore = [&](const SessionSnapshot& snapshot) {
    held.insert(snapshot.install.install.session_id);
    log_.Know(snapshot.install);
    shard.Replay(snapshot.install);
    for (const auto& [layer, image] : snapshot.images) shard.Replay(image);
  };
  PRECONDOR_RETURN_IF_ERROR(snapshots_.Open(
      restore, [this](const SessionSnapshot& snapshot, uint64_t sequence) { OnDurable(snapshot, sequence); }));
  PRECONDOR_RETURN_IF_ERROR(log_.Open([&shard](ShardRecord record) { shard.Replay(std::move(record)); }));
  // Sessions that a record after their snapshot removed; those that FinishReplay gives up remove themselves.
  for (const ShardSessionSummary& session : shard.ListSessions()) held.erase(session.session_id);
  for (const uint64_t gone : held) snapshots_.Remove(gone);
  shard.FinishReplay();
  return absl::OkStatus();
}

void ShardStore::Append(const ShardRecord& record) {
  log_.Append(record);
  if (const auto* removal = std::get_if<RemoveRecord>(&record)) snapshots_.Remove(removal->session_id);
}

void ShardStore::Keep(LayerImage image) {
  const std::optional<InstallRecord> install = log_.InstallOf(image.at.session_id);
  if (install.has_value()) snapshots_.Keep(std::move(image), *install, log_.next_sequence());
}

void ShardStore::OnDurable(const SessionSnapshot& snapshot, uint64_t sequence) {
  std::map<uint32_t, LayerStep> cuts;
  for (const auto& [layer, image] : snapshot.images) cuts[layer] = image.at;
  log_.OnSnapshot(snapshot.install.install.session_id, sequence, cuts);
}

}  // namespace precondor::recovery

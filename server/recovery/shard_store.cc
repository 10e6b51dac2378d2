// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/shard_store.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/store/crc32c.h"

namespace precondor::recovery {
namespace {

constexpr absl::string_view kLeaderFile = "leader";  // docs/storage.md

}  // namespace

ShardStore::ShardStore(store::FileSystem& fs, std::string data_dir, ShardLogOptions options, const Clock& clock,
                       Logger& logger, Observer& observer)
    : fs_(fs),
      dir_(store::JoinPath(data_dir, "shard")),
      log_(fs, store::JoinPath(dir_, "log"), options, clock, logger, observer),
      kept_(fs, store::JoinPath(dir_, "factors"), KeptOptions(options.reopen_interval), clock, logger, observer),
      snapshots_(fs, store::JoinPath(dir_, "snapshots"), clock, logger, observer, options.background) {}

KeptFactors::Options ShardStore::KeptOptions(absl::Duration retry) {
  return {.retry = retry,
          .post = [this](std::function<void()> job) { snapshots_.Post(std::move(job)); },
          .sync = [this] { log_.Sync(); }};
}

absl::Status ShardStore::RememberLeader(uint64_t token) {
  std::string bytes;
  PutU64(bytes, token);
  PutU32(bytes, store::Crc32c(bytes));
  return store::WriteFileDurably(fs_, store::JoinPath(dir_, kLeaderFile), bytes);
}

absl::StatusOr<uint64_t> ShardStore::ReadLeader() const {
  const std::string path = store::JoinPath(dir_, kLeaderFile);
  const absl::StatusOr<std::string> bytes = fs_.ReadFile(path);
  if (absl::IsNotFound(bytes.status())) return 0;
  PRECONDOR_RETURN_IF_ERROR(bytes.status());
  Decoder in(*bytes);
  const uint64_t token = in.U64();
  const uint32_t checksum = in.U32();
  if (in.done() && checksum == store::Crc32c(absl::string_view(*bytes).substr(0, sizeof(token)))) return token;
  return absl::DataLossError(absl::StrCat(path, ": damaged; expected a fencing token and its checksum"));
}

absl::Status ShardStore::Restore(Shard& shard) {
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, store::ParentDir(dir_)));
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, dir_));
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t leader, ReadLeader());
  shard.RestoreLeader(leader);
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> kept, kept_.Open());
  std::set<uint64_t> held(kept.begin(), kept.end());
  const auto restore = [&](const SessionSnapshot& snapshot) {
    held.insert(snapshot.install.install.session_id);
    log_.Know(snapshot.install);
    shard.Replay(snapshot.install);
    for (const auto& [layer, image] : snapshot.images) shard.Replay(image);
  };
  PRECONDOR_RETURN_IF_ERROR(snapshots_.Open(
      restore, [this](const SessionSnapshot& snapshot, uint64_t sequence) { OnDurable(snapshot, sequence); },
      [this](const SessionSnapshot& snapshot) { return Check(snapshot); }));
  PRECONDOR_RETURN_IF_ERROR(log_.Open([&shard](ShardRecord record) { shard.Replay(std::move(record)); }));
  if (const absl::Status replayed = shard.replay_status(); !replayed.ok()) {
    return absl::Status(replayed.code(),
                        absl::StrCat("sessions stored in ", dir_, " do not all fit: ", replayed.message(),
                                     "; nothing of them was changed: start with more memory or devices"));
  }
  // Sessions that a record after their snapshot removed; those that FinishReplay gives up remove themselves.
  for (const ShardSessionSummary& session : shard.ListSessions()) held.erase(session.session_id);
  for (const uint64_t gone : held) {
    snapshots_.Remove(gone);
    kept_.Remove(gone);
  }
  shard.FinishReplay();
  return absl::OkStatus();
}

void ShardStore::Append(const ShardRecord& record) {
  log_.Append(record);
  if (const auto* removal = std::get_if<RemoveRecord>(&record)) {
    snapshots_.Remove(removal->session_id);
    kept_.Remove(removal->session_id);
  } else if (const auto* factors = std::get_if<FactorsRecord>(&record); factors != nullptr && factors->held) {
    kept_.TakenBack(factors->at.session_id, factors->release);
  }
}

void ShardStore::KeepFactors(ReleasedFactors factors) {
  const std::optional<InstallRecord> install = log_.InstallOf(factors.session_id);
  if (install.has_value()) kept_.Keep(install->install.spec.name, std::move(factors));
}

absl::Status ShardStore::Check(const SessionSnapshot& snapshot) const {
  std::set<uint64_t> needed;
  for (const auto& [layer, image] : snapshot.images) {
    if (!image.held && image.release != 0) needed.insert(image.release);
  }
  for (const uint64_t release : needed) {
    PRECONDOR_RETURN_IF_ERROR(kept_.CheckDurable(snapshot.install.install.session_id, release));
  }
  return absl::OkStatus();
}

void ShardStore::Keep(LayerImage image) {
  const std::optional<InstallRecord> install = log_.InstallOf(image.at.session_id);
  if (install.has_value()) snapshots_.Keep(std::move(image), *install, log_.next_sequence());
}

void ShardStore::OnDurable(const SessionSnapshot& snapshot, uint64_t sequence) {
  std::map<uint32_t, LayerStep> cuts;
  uint64_t floor = std::numeric_limits<uint64_t>::max();
  for (const auto& [layer, image] : snapshot.images) {
    cuts[layer] = image.at;
    // Records after the image make what is released later; nobody goes back to what came before it.
    floor = std::min(floor, image.release + (image.held ? 1 : 0));
  }
  log_.OnSnapshot(snapshot.install.install.session_id, sequence, cuts);
  kept_.OnSnapshot(snapshot.install.install.session_id, floor);
}

}  // namespace precondor::recovery

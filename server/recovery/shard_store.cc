// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/shard_store.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/store/crc32c.h"

namespace precondor::recovery {
namespace {

constexpr absl::string_view kLeaderFile = "leader";  // docs/operate/storage.md

}  // namespace

ShardStore::ShardStore(store::FileSystem& fs, const std::string& data_dir, ShardLogOptions options, const Clock& clock,
                       Logger& logger, StoreObserver& observer, const GradientLogOptions& gradient_options)
    : fs_(fs),
      dir_(store::JoinPath(data_dir, "shard")),
      logger_(logger),
      quarantine_(fs, store::JoinPath(dir_, "quarantine"), clock),
      log_(fs, store::JoinPath(dir_, "log"), options, clock, logger, observer),
      gradients_(fs, store::JoinPath(dir_, "gradients"), gradient_options, clock, logger, observer),
      snapshots_(fs, store::JoinPath(dir_, "snapshots"), clock, logger, observer, options.background) {}

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
  PRECONDOR_ASSIGN_OR_RETURN(lock_, fs_.Lock(store::JoinPath(dir_, "LOCK")));
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t leader, ReadLeader());
  shard.replay().RestoreLeader(leader);
  PRECONDOR_RETURN_IF_ERROR(quarantine_.Open());
  std::set<uint64_t> held;
  // Replays only the sessions that exist at the end of the log: only they must fit into memory, and no session meets an
  // earlier one of its name.
  PRECONDOR_ASSIGN_OR_RETURN(Ends ends, FindEnds());
  const auto replay = [&](ShardRecord record) {
    const bool moves = std::holds_alternative<QuarantineRecord>(record);
    if (!moves && ends[SessionOf(record)].quarantined_at == 0) shard.replay().Add(std::move(record));
  };
  const auto restore = [&](const SnapshotImages& snapshot) {
    const uint64_t id = snapshot.install.install.session_id;
    held.insert(id);
    End& end = ends[id];
    if (end.removed_at != 0 && snapshot.sequence <= end.removed_at) return;
    end.snapshot_at = snapshot.sequence;
    log_.Know(snapshot.install, end.removed_at + 1);
    replay(snapshot.install);
    if (end.quarantined_at != 0) return;
    for (const auto& [layer, image] : snapshot.images) shard.replay().Load(image);
  };
  PRECONDOR_RETURN_IF_ERROR(snapshots_.Open(
      restore, [this](const SnapshotImages& snapshot, uint64_t sequence) { OnDurable(snapshot, sequence); },
      [this](uint64_t session_id) { return quarantine_.Holds(session_id); }));
  const std::vector<uint64_t> returned = quarantine_.Returned();
  for (const uint64_t id : returned) PRECONDOR_RETURN_IF_ERROR(ReplayQuarantined(id, 1, replay));
  PRECONDOR_RETURN_IF_ERROR(log_.Open(replay, [&](uint64_t session_id, uint64_t sequence) {
    return sequence <= ends[session_id].removed_at || quarantine_.Holds(session_id) ||
           quarantine_.Skips(session_id, sequence);
  }));
  PRECONDOR_RETURN_IF_ERROR(ReplayGradients(shard, ends));
  for (const auto& [id, end] : ends) {
    if (end.quarantined_at == 0 || quarantine_.Holds(id)) continue;
    shard.replay().Add(QuarantineRecord{.session_id = id, .last_step = end.last_step});
  }
  if (const absl::Status replayed = shard.replay().status(); !replayed.ok()) {
    return absl::Status(replayed.code(),
                        absl::StrCat("sessions stored in ", dir_, " do not all fit: ", replayed.message(),
                                     "; nothing of them was changed: start with more memory"));
  }
  // Removes the files of sessions that are not in the shard now: a record after their snapshot removed them.
  // ShardReplay::Finish appends remove records for the sessions that it gives up.
  held.insert(returned.begin(), returned.end());
  for (const ShardSessionSummary& session : shard.ListSessions()) held.erase(session.session_id);
  for (const uint64_t gone : held) {
    if (quarantine_.Holds(gone) || shard.replay().IsQuarantined(gone)) continue;
    if (quarantine_.Knows(gone)) PRECONDOR_RETURN_IF_ERROR(quarantine_.Remove(gone));
    snapshots_.Remove(gone);
  }
  shard.replay().Finish();
  return absl::OkStatus();
}

absl::StatusOr<ShardStore::Ends> ShardStore::FindEnds() {
  Ends ends;
  PRECONDOR_RETURN_IF_ERROR(log_.Scan([&](const store::Record& record) -> absl::Status {
    const auto type = static_cast<RecordType>(record.type);
    if (type != RecordType::kRemove && type != RecordType::kQuarantine) return absl::OkStatus();
    PRECONDOR_ASSIGN_OR_RETURN(const ShardRecord decoded, DecodeRecord(record.type, record.payload));
    const uint64_t id = SessionOf(decoded);
    if (quarantine_.Skips(id, record.sequence)) return absl::OkStatus();
    const auto* const moved = std::get_if<QuarantineRecord>(&decoded);
    End& end = ends[id];
    if (moved == nullptr) {
      end = {.removed_at = record.sequence};
    } else {
      end.quarantined_at = moved->back ? 0 : record.sequence;
      end.last_step = moved->last_step;
    }
    return absl::OkStatus();
  }));
  // Completes removals that a crash interrupted.
  for (const auto& [id, end] : ends) {
    if (end.removed_at != 0 && quarantine_.Knows(id)) PRECONDOR_RETURN_IF_ERROR(quarantine_.Remove(id));
  }
  return ends;
}

absl::Status ShardStore::ReplayGradients(Shard& shard, Ends& ends) {
  for (const uint64_t id : quarantine_.Returned()) {
    PRECONDOR_RETURN_IF_ERROR(ReplayQuarantinedGradients(id, ends[id].snapshot_at, shard.replay()));
  }
  std::set<uint64_t> seen;
  PRECONDOR_RETURN_IF_ERROR(gradients_.Open([&](GradientRecord record, uint64_t log_sequence) {
    const uint64_t id = record.at.session_id;
    seen.insert(id);
    const End& end = ends[id];
    // A gradient from before the snapshot is in it, or was made for factors that a loss had taken away.
    const bool counts = log_sequence > end.removed_at && log_sequence >= end.snapshot_at && end.quarantined_at == 0;
    if (counts && !quarantine_.Skips(id, log_sequence)) shard.replay().Add(std::move(record));
  }));
  for (const ShardSessionSummary& session : shard.ListSessions()) seen.erase(session.session_id);
  for (const uint64_t gone : seen) {
    if (ends[gone].quarantined_at == 0 || quarantine_.Holds(gone)) gradients_.Forget(gone);  // others are to be copied
  }
  return absl::OkStatus();
}

bool ShardStore::AppendGradient(const GradientRecord& record) {
  const uint64_t id = record.at.session_id;
  const bool due = gradients_.Append(log_.NameOf(id), record, log_.next_sequence());
  if (log_.NameOf(id).empty()) gradients_.Forget(id);  // removed by another thread, perhaps before the Append
  return due;
}

void ShardStore::Append(const ShardRecord& record) {
  log_.Append(record);
  if (const auto* removal = std::get_if<RemoveRecord>(&record)) {
    gradients_.Forget(removal->session_id);
    snapshots_.Remove(removal->session_id);
    const bool known = quarantine_.Knows(removal->session_id);
    const absl::Status removed = known ? quarantine_.Remove(removal->session_id) : absl::OkStatus();
    if (!removed.ok()) {
      logger_.Log(Severity::kWarning, "records of a closed session stay",
                  {{"session_id", removal->session_id}, {"reason", absl::string_view(removed.message())}});
    }
  }
}

void ShardStore::Keep(LayerImage image) {
  const uint64_t id = image.at.session_id;
  const std::optional<InstallRecord> install = log_.InstallOf(id);
  if (!install.has_value()) return;
  snapshots_.Keep(std::move(image), *install, log_.next_sequence(), gradients_.MarkOf(id));
  if (log_.NameOf(id).empty()) snapshots_.Remove(id);  // as in AppendGradient
}

void ShardStore::OnDurable(const SnapshotImages& snapshot, uint64_t sequence) {
  std::map<uint32_t, LayerStep> snapshot_steps;
  uint64_t state_bytes = 0;
  for (const auto& [layer, image] : snapshot.images) {
    snapshot_steps[layer] = image.at;
    state_bytes += image.state.size();
  }
  log_.OnSnapshot(snapshot.install.install.session_id, sequence, snapshot.sequence, snapshot_steps);
  gradients_.OnSnapshot(snapshot.install.install.session_id, snapshot.gradients, state_bytes);
  // If this fails, the next snapshot's call removes the directory.
  quarantine_.OnSnapshot(snapshot.install.install.session_id, sequence).IgnoreError();
}

// --- quarantine -----------------------------------------------------------------------------------------------------

absl::Status ShardStore::CheckQuarantine(uint64_t session_id) {
  if (!log_.stale(session_id)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("session_id ", session_id, ": the log lacks records of it, it would not come back from quarantine"));
}

absl::Status ShardStore::Quarantine(uint64_t session_id, uint64_t last_step) {
  const std::optional<InstallRecord> install = log_.InstallOf(session_id);
  if (!install.has_value()) {
    // Removes the session, so that one with this id can be installed again.
    Append(RemoveRecord{session_id});
    return absl::NotFoundError(absl::StrCat("session_id ", session_id, ": the log does not know it"));
  }
  const absl::Status put = quarantine_.Put(
      {.install = install->install, .last_step = last_step}, log_.NeededFrom(session_id),
      [this](const store::LogReplay& replay) { return log_.Read(replay); },
      [&](const store::LogReplay& replay) { return gradients_.Read(session_id, replay); });
  if (absl::IsNotFound(put)) return absl::DataLossError(put.message());
  PRECONDOR_RETURN_IF_ERROR(put);
  snapshots_.Forget(session_id);
  gradients_.Forget(session_id);
  log_.Forget(session_id);
  return absl::OkStatus();
}

absl::Status ShardStore::ReplayQuarantined(uint64_t session_id, uint64_t needed_from,
                                           absl::FunctionRef<void(ShardRecord)> replay) {
  return quarantine_.Replay(session_id, [&](const store::Record& record) -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(ShardRecord decoded, DecodeRecord(record.type, record.payload));
    if (const auto* install = std::get_if<InstallRecord>(&decoded)) log_.Know(*install, needed_from);
    replay(std::move(decoded));
    return absl::OkStatus();
  });
}

absl::Status ShardStore::ReplayQuarantinedGradients(uint64_t session_id, uint64_t snapshot_at, ShardReplay& replay) {
  return quarantine_.ReplayGradients(session_id, [&](const store::Record& record) -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(StoredGradient gradient, DecodeGradient(record.type, record.payload));
    if (gradient.log_sequence >= snapshot_at) replay.Add(std::move(gradient.record));
    return absl::OkStatus();
  });
}

absl::Status ShardStore::Return(uint64_t session_id, ShardReplay& replay) {
  const uint64_t from = log_.next_sequence();
  if (from == 0) return absl::UnavailableError("the shard's log cannot be written");
  uint64_t snapshot_at = 0;
  absl::Status status = snapshots_.Load(session_id, [&](const SnapshotImages& snapshot) {
    snapshot_at = snapshot.sequence;
    log_.Know(snapshot.install, from);
    replay.Add(snapshot.install);
    for (const auto& [layer, image] : snapshot.images) replay.Load(image);
  });
  if (status.ok()) {
    status = ReplayQuarantined(session_id, from, [&replay](ShardRecord record) { replay.Add(std::move(record)); });
  }
  if (status.ok()) status = ReplayQuarantinedGradients(session_id, snapshot_at, replay);
  const absl::Status replayed = replay.CheckReturned(session_id);
  if (status.ok()) status = replayed;
  if (status.ok()) {
    const absl::StatusOr<uint64_t> back = log_.AppendDurably(QuarantineRecord{.session_id = session_id, .back = true});
    status = back.ok() ? quarantine_.Return(session_id, *back) : back.status();
  }
  if (!status.ok()) log_.Forget(session_id);
  return status;
}

absl::StatusOr<bool> ShardStore::DeleteQuarantined(uint64_t session_id) {
  if (!quarantine_.Holds(session_id)) return false;
  // Makes the removal durable before any file is removed: the log may still have records of the session, and a session
  // whose files are partly removed cannot be recovered.
  PRECONDOR_RETURN_IF_ERROR(log_.AppendDurably(RemoveRecord{session_id}).status());
  const absl::Status removed = quarantine_.Remove(session_id);
  if (quarantine_.Holds(session_id)) return removed;
  snapshots_.Remove(session_id);
  return true;
}

}  // namespace precondor::recovery

// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/stored_session.h"

#include <optional>
#include <tuple>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"
#include "server/recovery/shard_snapshots.h"

namespace precondor::recovery {
namespace {

// Session id, step and number, which identify a session's snapshot. Each shard has a part of it.
using SnapshotKey = std::tuple<uint64_t, uint64_t, uint64_t>;

absl::Status AddSnapshots(store::FileSystem& fs, const std::string& dir, const std::string& session, uint64_t number,
                          std::map<SnapshotKey, StoredSession>& snapshots) {
  const std::shared_ptr<const store::SnapshotStore> store = store::SnapshotStore::OpenForReading(fs, dir);
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, store->List());
  for (const uint64_t id : ids) {
    PRECONDOR_ASSIGN_OR_RETURN(const store::SnapshotManifest manifest, store->ReadManifest(id));
    PRECONDOR_ASSIGN_OR_RETURN(const SnapshotImages snapshot, DecodeMetadata(manifest.metadata));
    const SessionInstall& install = snapshot.install.install;
    if (install.spec.name != session || (number != 0 && snapshot.number != number)) continue;
    StoredSession& found = snapshots[SnapshotKey(install.session_id, snapshot.step, snapshot.number)];
    found.spec = install.spec;
    found.step = snapshot.step;
    found.number = snapshot.number;
    for (const uint32_t layer : install.layers) {
      found.layers[layer] = {.dir = dir, .store = store, .manifest = manifest, .key = LayerKey(layer)};
    }
  }
  return absl::OkStatus();
}

std::string Describe(const std::map<SnapshotKey, StoredSession>& snapshots) {
  if (snapshots.empty()) return "none of it";
  return absl::StrJoin(snapshots, "; ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, "step ", entry.second.step, " snapshot ", entry.second.number, " with ",
                    entry.second.layers.size(), " of ", entry.second.spec.layers.size(), " layers");
  });
}

}  // namespace

absl::StatusOr<StoredSession> FindStoredSession(store::FileSystem& fs, const std::vector<std::string>& data_dirs,
                                                const std::string& session, uint64_t number) {
  std::map<SnapshotKey, StoredSession> snapshots;
  for (const std::string& data_dir : data_dirs) {
    const std::string dir = store::JoinPath(store::JoinPath(data_dir, "shard"), "snapshots");
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.List(dir));
    for (const std::string& name : names) {
      uint64_t session_id = 0;
      if (!absl::SimpleAtoi(name, &session_id)) continue;
      PRECONDOR_RETURN_IF_ERROR(AddSnapshots(fs, store::JoinPath(dir, name), session, number, snapshots));
    }
  }
  for (auto it = snapshots.rbegin(); it != snapshots.rend(); ++it) {
    if (it->second.layers.size() == it->second.spec.layers.size()) return it->second;
  }
  return absl::NotFoundError(absl::StrCat("session \"", session, "\"", number == 0 ? "" : " snapshot ",
                                          number == 0 ? "" : absl::StrCat(number),
                                          ": expected all layers as of one step, found ", Describe(snapshots)));
}

absl::StatusOr<std::string> ReadLayer(const StoredLayer& layer) { return layer.store->Read(layer.manifest, layer.key); }

absl::Status VerifyStoredSession(const StoredSession& session) {
  std::optional<uint64_t> rollback_epoch;
  for (const auto& [index, layer] : session.layers) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, ReadLayer(layer));
    PRECONDOR_ASSIGN_OR_RETURN(const LayerImage image, DecodeImage(bytes));
    if (rollback_epoch.value_or(image.at.rollback_epoch) != image.at.rollback_epoch) {
      return absl::FailedPreconditionError(
          absl::StrCat("session \"", session.spec.name, "\" step ", session.step, " layer ", index,
                       ": the job rolled back between the parts of this snapshot: expected epoch ", *rollback_epoch,
                       ", got ", image.at.rollback_epoch));
    }
    rollback_epoch = image.at.rollback_epoch;
  }
  return absl::OkStatus();
}

absl::Status CheckDirectoriesNotInUse(store::FileSystem& fs, const StoredSession& session) {
  for (const auto& [index, layer] : session.layers) {
    const absl::Status locked = fs.Lock(store::JoinPath(layer.dir, "LOCK")).status();
    // Ignores other errors: a copy may be on a read-only file system.
    if (!absl::IsFailedPrecondition(locked)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        layer.dir, ": a shard that runs holds it, and removes it when the session is closed; copy it first"));
  }
  return absl::OkStatus();
}

}  // namespace precondor::recovery

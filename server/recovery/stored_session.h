// SPDX-License-Identifier: Apache-2.0
// Finds and reads the snapshot of a session in the data directories of its shards. Changes nothing in them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "server/store/snapshot_store.h"

namespace precondor::recovery {

// A layer's file in a snapshot.
struct StoredLayer {
  std::string dir;  // directory of the session's snapshots on one shard
  std::shared_ptr<const store::SnapshotStore> store;
  store::SnapshotManifest manifest;
  std::string key;
};

// All layers of a session as of one step, from one shard or more.
struct StoredSession {
  SessionSpec spec;
  uint64_t step = 0;
  uint64_t number = 0;  // the coordinator's number of the snapshot; 0 means none
  std::map<uint32_t, StoredLayer> layers;
};

// Returns the newest complete snapshot of the session: of those that have all layers, the one with the greatest session
// id, then step, then number. If `number` is not 0, only snapshots of that number count. `data_dirs` are the shards'
// data directories or copies of them. Returns NOT_FOUND with the parts that exist if no snapshot is complete, DATA_LOSS
// with the name of a damaged file, or the disk's errors.
absl::StatusOr<StoredSession> FindStoredSession(store::FileSystem& fs, const std::vector<std::string>& data_dirs,
                                                const std::string& session, uint64_t number);
// Returns a layer's bytes in the form that RestoreLayer takes. Returns DATA_LOSS with the file, the expected and the
// actual value if the file is damaged.
absl::StatusOr<std::string> ReadLayer(const StoredLayer& layer);
// Reads and checks all layers. Returns FAILED_PRECONDITION if the job rolled back between the parts of two shards, or
// the errors of ReadLayer and DecodeImage.
absl::Status VerifyStoredSession(const StoredSession& session);
// Returns FAILED_PRECONDITION if a running shard uses one of the directories: it would remove the snapshot when the
// session is closed.
absl::Status CheckDirectoriesNotInUse(store::FileSystem& fs, const StoredSession& session);

}  // namespace precondor::recovery

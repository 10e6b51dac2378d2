// SPDX-License-Identifier: Apache-2.0
// A session's snapshot as it lies in the data directories of its shards. Reading it changes nothing there.
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

struct StoredLayer {
  std::string dir;  // of the session's snapshots on one shard
  std::shared_ptr<const store::SnapshotStore> store;
  store::SnapshotManifest manifest;
  std::string key;
};

// All layers of a session as of one step, from however many shards.
struct StoredSession {
  SessionSpec spec;
  uint64_t step = 0;
  uint64_t number = 0;  // the coordinator's
  std::map<uint32_t, StoredLayer> layers;
};

// The newest snapshot of the session that is there with all its layers; `number` 0: any. `data_dirs`: of the shards, or
// copies. NotFound: none is whole; says which parts exist. Errors: the disk's; DataLoss names the file.
absl::StatusOr<StoredSession> FindStoredSession(store::FileSystem& fs, const std::vector<std::string>& data_dirs,
                                                const std::string& session, uint64_t number);
// A layer's bytes as RestoreLayer takes them. DataLoss names the file, what was expected and what came.
absl::StatusOr<std::string> ReadLayer(const StoredLayer& layer);
// Reads all of it. As ReadLayer; FailedPrecondition: the job rolled back to an earlier step between two shards' parts.
absl::Status VerifyStoredSession(const StoredSession& session);
// FailedPrecondition: a shard that runs holds one of the directories, and removes the snapshot with the session.
absl::Status CheckNobodyHolds(store::FileSystem& fs, const StoredSession& session);

}  // namespace precondor::recovery

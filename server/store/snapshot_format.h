// SPDX-License-Identifier: Apache-2.0
// Bytes of a snapshot's files (docs/storage.md). Pure functions; messages do not name the file.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/store/snapshot_store.h"

namespace precondor::store {

// What precedes the caller's bytes in a file.
std::string EncodeSnapshotFileHeader(uint64_t id, absl::string_view key);
// That `file` is all of what the manifest expects under `key`. DataLoss, or FailedPrecondition for a newer format.
absl::Status CheckSnapshotFile(absl::string_view file, uint64_t id, absl::string_view key,
                               const SnapshotFile& expected);

std::string EncodeManifest(const SnapshotManifest& manifest);
// DataLoss when damaged or of another snapshot than `id`, FailedPrecondition when of a newer format.
absl::StatusOr<SnapshotManifest> DecodeManifest(absl::string_view bytes, uint64_t id);

}  // namespace precondor::store

// SPDX-License-Identifier: Apache-2.0
// Byte format of a snapshot's files (docs/operate/storage.md). Pure functions; their messages do not contain the file's
// name.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/store/snapshot_store.h"

namespace precondor::store {

// Returns the bytes that precede the caller's bytes in a file.
std::string EncodeSnapshotFileHeader(uint64_t id, absl::string_view key);
// Checks that `file` is what the manifest expects for `key`. Returns DataLoss if not, and FailedPrecondition for a
// newer format.
absl::Status CheckSnapshotFile(absl::string_view file, uint64_t id, absl::string_view key,
                               const SnapshotFile& expected);

std::string EncodeManifest(const SnapshotManifest& manifest);
// Returns DataLoss if the bytes are damaged or of a snapshot other than `id`, and FailedPrecondition for a newer
// format.
absl::StatusOr<SnapshotManifest> DecodeManifest(absl::string_view bytes, uint64_t id);

}  // namespace precondor::store

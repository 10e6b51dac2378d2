// SPDX-License-Identifier: Apache-2.0
// Byte format of a snapshot's files (docs/operate/storage.md). Pure functions; their messages do not contain the file's
// name.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor::store {

struct SnapshotFile {
  uint64_t file_bytes = 0;  // including the file's header
  uint32_t checksum = 0;    // CRC-32C of the whole file
  bool operator==(const SnapshotFile&) const = default;
};

struct SnapshotManifest {
  uint64_t id = 0;
  std::string metadata;                       // defined by the caller
  std::map<std::string, SnapshotFile> files;  // by key
};

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

// SPDX-License-Identifier: Apache-2.0
// Reads the ring in which earlier versions kept the last bytes of a log. RecordLog moves its records to a segment when
// it opens the directory, and removes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/store/file_system.h"

namespace precondor::store {

// The log's segments formed one stream of bytes, in which each segment began at a block boundary. The ring held its
// last bytes: a byte's place was its position in the stream modulo the ring's size. Bytes below the *floor* are in
// segments.
constexpr absl::string_view kLogRing = "ring";
constexpr size_t kBlockBytes = 4096;

constexpr uint64_t NextBlock(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

// Contents of a ring from its floor on.
struct LogRing {
  uint64_t position = 0;  // position of the floor
  uint64_t sequence = 0;  // sequence of the record at the floor
  std::string bytes;      // the whole ring, starting at the floor; the records show how much of it is valid
};
// Returns nullopt if the directory has no ring. Errors: DataLoss damaged; FailedPrecondition a newer format; those of
// FileSystem.
absl::StatusOr<std::optional<LogRing>> ReadLogRing(FileSystem& fs, const std::string& dir);

}  // namespace precondor::store

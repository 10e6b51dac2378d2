// SPDX-License-Identifier: Apache-2.0
// Reads what is in the directory of a record log; bytes in docs/storage.md. Changes nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/store/file_system.h"

namespace precondor::store {

struct Record {
  uint64_t sequence = 0;  // the first record ever appended has 1, each next one more
  uint8_t type = 0;       // the caller's, 1 ... 255
  absl::string_view payload;
};

// A status that is not OK ends the reading with that status. Null: check everything, hand out nothing.
using LogReplay = std::function<absl::Status(const Record&)>;

struct LogSegment {
  uint64_t first_sequence = 0;
  uint64_t size_bytes = 0;  // without what is torn
};

struct LogContents {
  std::vector<LogSegment> segments;  // ascending
  std::string last;                  // valid bytes of the last segment, and the ring's records that it lacks
  uint64_t next_sequence = 1;        // that the next record gets
  uint64_t torn_bytes = 0;           // at the end of the last segment, zeros that end it aside
};

constexpr absl::string_view kLogSegmentSuffix = ".log";
constexpr absl::string_view kLogUnfinishedSuffix = ".tmp";
std::string LogSegmentPath(absl::string_view dir, uint64_t first_sequence);

// Hands out the records of the segments, and those of the ring that come after them, in the order of their sequences,
// up to what a crash has torn or the owner is writing. The directory may be in use: what had been synced before the
// call is handed out, and perhaps some of what came later. What was handed out before an error must be thrown away.
// Errors: NotFound no such directory; DataLoss damage or a gap, with file and offset; FailedPrecondition a newer
// format;
//         Aborted the owner has removed a segment meanwhile, read again; those of FileSystem.
absl::StatusOr<LogContents> ReadLog(FileSystem& fs, const std::string& dir, const LogReplay& replay);

}  // namespace precondor::store

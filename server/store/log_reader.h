// SPDX-License-Identifier: Apache-2.0
// Reads the directory of a record log without changing it. docs/operate/storage.md describes the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/store/file_system.h"

namespace precondor::store {

// --- byte format of a log segment (docs/operate/storage.md)

inline constexpr size_t kSegmentHeaderBytes = 24;
inline constexpr size_t kRecordHeaderBytes = 17;
// Type of the sync mark, which the log appends after a successful sync: all records below its sequence were on the disk
// when it was written. Its payload is empty. Records that were appended during the sync can stand before the mark.
inline constexpr uint8_t kSyncMark = 0;

std::string EncodeSegmentHeader(uint64_t first_sequence);
// Returns DataLoss if the header is damaged or has another first sequence, and FailedPrecondition for another format.
// The message does not contain the file's name.
absl::Status CheckSegmentHeader(absl::string_view segment, uint64_t first_sequence);

// Returns the bytes that precede the payload in the file. The payload is given in pieces.
std::string EncodeRecordHeader(uint64_t sequence, uint8_t type, absl::Span<const absl::string_view> payload);

struct ParsedRecord {
  uint64_t sequence = 0;
  uint8_t type = 0;
  absl::string_view payload;
  size_t bytes() const { return kRecordHeaderBytes + payload.size(); }
};
// Returns the record at the beginning of `bytes`, or nullopt if it is cut short or its checksum does not match.
std::optional<ParsedRecord> ParseRecord(absl::string_view bytes);

// Returns whether a complete sync mark with a sequence of at least `sequence` begins anywhere in `bytes`.
bool HasSyncMark(absl::string_view bytes, uint64_t sequence);

struct Record {
  uint64_t sequence = 0;  // 1 for the first record ever appended, then ascending by 1
  uint8_t type = 0;       // the caller's: 1 ... 255
  absl::string_view payload;
};

// Receives each record. An error ends the reading and is returned. Null: ReadLog checks everything and delivers
// nothing.
using LogReplay = std::function<absl::Status(const Record&)>;

struct LogSegment {
  uint64_t first_sequence = 0;
  uint64_t size_bytes = 0;  // without the torn end
};

struct LogContents {
  std::vector<LogSegment> segments;  // ascending
  std::string last;                  // valid bytes of the last segment
  uint64_t next_sequence = 1;        // sequence of the next record
  uint64_t torn_bytes = 0;           // size of the torn end of the last segment, without zeros that end it
};

constexpr absl::string_view kLogSegmentSuffix = ".log";
constexpr absl::string_view kLogUnfinishedSuffix = ".tmp";
std::string LogSegmentPath(absl::string_view dir, uint64_t first_sequence);

// Calls `replay` for the records in the order of their sequences, up to a record that is torn or being written. The
// directory may be in use: `replay` gets all records that were synced before the call, and possibly later ones. After
// an error the caller must discard what `replay` got. Errors: NotFound no such directory; DataLoss damage or a gap,
// with file and offset; FailedPrecondition another format; Aborted the owner has removed a segment during the call,
// read again; those of FileSystem.
absl::StatusOr<LogContents> ReadLog(FileSystem& fs, const std::string& dir, const LogReplay& replay);

}  // namespace precondor::store

// SPDX-License-Identifier: Apache-2.0
// Byte format of a log segment (docs/operate/storage.md). Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace precondor::store {

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

}  // namespace precondor::store

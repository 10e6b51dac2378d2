// SPDX-License-Identifier: Apache-2.0
// Bytes of a log segment (docs/storage.md). Pure functions.
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
// Type of the mark that follows a successful sync: all records below its sequence were on disk when it was written. Its
// payload is empty. Records that came while the sync ran may stand between those and the mark.
inline constexpr uint8_t kSyncMark = 0;

std::string EncodeSegmentHeader(uint64_t first_sequence);
// DataLoss when damaged or for another first sequence, FailedPrecondition when of a newer format; not naming the file.
absl::Status CheckSegmentHeader(absl::string_view segment, uint64_t first_sequence);

// What precedes the payload, given in pieces, in the file.
std::string EncodeRecordHeader(uint64_t sequence, uint8_t type, absl::Span<const absl::string_view> payload);

struct ParsedRecord {
  uint64_t sequence = 0;
  uint8_t type = 0;
  absl::string_view payload;
  size_t bytes() const { return kRecordHeaderBytes + payload.size(); }
};
// The record at the beginning of `bytes`; nullopt when it is cut short or its checksum does not match.
std::optional<ParsedRecord> ParseRecord(absl::string_view bytes);

// Whether a whole sync mark with a sequence of at least `sequence` begins anywhere in `bytes`.
bool HasSyncMark(absl::string_view bytes, uint64_t sequence);

}  // namespace precondor::store

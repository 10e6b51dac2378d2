// SPDX-License-Identifier: Apache-2.0
#include "server/store/log_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/store/crc32c.h"

namespace precondor::store {
namespace {

constexpr absl::string_view kMagic = "PCONDLOG";
constexpr uint32_t kSegmentVersion = 2;

absl::Status Located(const absl::Status& error, absl::string_view path, uint64_t offset) {
  return absl::Status(error.code(), absl::StrCat(path, " at offset ", offset, ": ", error.message()));
}

// Returns the first sequences of the segments, ascending.
absl::StatusOr<std::vector<uint64_t>> ListSegments(FileSystem& fs, const std::string& dir) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.List(dir));
  std::vector<uint64_t> found;
  for (const std::string& name : names) {
    absl::string_view digits = name;
    uint64_t first_sequence = 0;
    if (!absl::ConsumeSuffix(&digits, kLogSegmentSuffix)) continue;
    if (!absl::SimpleAtoi(digits, &first_sequence) || LogSegmentPath(dir, first_sequence) != JoinPath(dir, name)) {
      return absl::DataLossError(absl::StrCat(JoinPath(dir, name), ": not the name of a log segment"));
    }
    found.push_back(first_sequence);
  }
  std::sort(found.begin(), found.end());
  return found;
}

class Reader {
 public:
  Reader(FileSystem& fs, const std::string& dir, const LogReplay& replay) : fs_(fs), dir_(dir), replay_(replay) {}

  absl::StatusOr<LogContents> Read() {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> found, ListSegments(fs_, dir_));
    if (!found.empty()) contents_.next_sequence = found.front();
    for (const uint64_t first_sequence : found) {
      if (first_sequence != contents_.next_sequence) {
        return absl::DataLossError(absl::StrCat(LogSegmentPath(dir_, first_sequence),
                                                ": expected the segment that begins with ", contents_.next_sequence,
                                                "; records between are missing"));
      }
      PRECONDOR_RETURN_IF_ERROR(ReadSegment(first_sequence, first_sequence == found.back()));
      contents_.segments.push_back({first_sequence, contents_.last.size()});
    }
    return std::move(contents_);
  }

 private:
  absl::Status HandOut(const ParsedRecord& record) {
    if (replay_ != nullptr) PRECONDOR_RETURN_IF_ERROR(replay_({record.sequence, record.type, record.payload}));
    ++contents_.next_sequence;
    return absl::OkStatus();
  }

  absl::Status ReadSegment(uint64_t first_sequence, bool last) {
    const std::string path = LogSegmentPath(dir_, first_sequence);
    absl::StatusOr<std::string> read = fs_.ReadFile(path);
    if (absl::IsNotFound(read.status())) {
      return absl::AbortedError(absl::StrCat(path, ": was removed while the log was read"));
    }
    if (!read.ok()) return read.status();
    contents_.last = *std::move(read);
    const absl::string_view bytes = contents_.last;
    if (const absl::Status header = CheckSegmentHeader(bytes, first_sequence); !header.ok()) {
      return Located(header, path, 0);
    }
    size_t offset = kSegmentHeaderBytes;
    while (offset < bytes.size()) {
      const std::optional<ParsedRecord> record = ParseRecord(bytes.substr(offset));
      if (!record.has_value()) break;
      const uint64_t next = contents_.next_sequence;
      if (record->type == kSyncMark ? record->sequence > next : record->sequence != next) {
        return Located(absl::DataLossError(absl::StrCat("record ", record->sequence, " where ", next, " was expected")),
                       path, offset);
      }
      if (record->type != kSyncMark) PRECONDOR_RETURN_IF_ERROR(HandOut(*record));
      offset += record->bytes();
    }
    // A crash of the machine can leave zeros.
    if (bytes.find_first_not_of('\0', offset) == absl::string_view::npos) {
      contents_.last.resize(offset);
      return absl::OkStatus();
    }
    // Only records that no sync covered may be torn. Earlier segments were synced before the next one began, and a
    // later mark shows that a sync covered this record.
    if (!last || HasSyncMark(bytes.substr(offset), contents_.next_sequence + 1)) {
      return Located(absl::DataLossError(absl::StrCat("record ", contents_.next_sequence, " is damaged")), path,
                     offset);
    }
    contents_.torn_bytes = bytes.size() - offset;
    contents_.last.resize(offset);
    return absl::OkStatus();
  }

  FileSystem& fs_;
  const std::string& dir_;
  const LogReplay& replay_;
  LogContents contents_;
};

}  // namespace

std::string EncodeSegmentHeader(uint64_t first_sequence) {
  std::string header(kMagic);
  PutU32(header, kSegmentVersion);
  PutU64(header, first_sequence);
  PutU32(header, Crc32c(header));
  return header;
}

absl::Status CheckSegmentHeader(absl::string_view segment, uint64_t first_sequence) {
  Decoder decoder(segment);
  const absl::string_view magic = decoder.Take(kMagic.size());
  const uint32_t version = decoder.U32();
  const uint64_t found = decoder.U64();
  const uint32_t checksum = decoder.U32();
  if (!decoder.ok()) {
    return absl::DataLossError(
        absl::StrCat("segment header has ", segment.size(), " bytes, expected ", kSegmentHeaderBytes));
  }
  if (magic != kMagic || checksum != Crc32c(segment.substr(0, kSegmentHeaderBytes - 4))) {
    return absl::DataLossError("segment header is damaged");
  }
  if (version != kSegmentVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("log segment: format: expected ", kSegmentVersion, ", got ", version,
                     ", of another version: docs/operate/operations.md#upgrade says how to go on"));
  }
  if (found != first_sequence) {
    return absl::DataLossError(
        absl::StrCat("segment header names first sequence ", found, ", its file ", first_sequence));
  }
  return absl::OkStatus();
}

std::string EncodeRecordHeader(uint64_t sequence, uint8_t type, absl::Span<const absl::string_view> payload) {
  uint32_t length = 0;
  for (const absl::string_view piece : payload) length += static_cast<uint32_t>(piece.size());
  std::string checked;
  PutU32(checked, length);
  PutU64(checked, sequence);
  PutFixed(checked, type, 1);
  uint32_t checksum = Crc32c(checked);
  for (const absl::string_view piece : payload) checksum = ExtendCrc32c(checksum, piece);
  std::string header;
  PutU32(header, checksum);
  return header + checked;
}

std::optional<ParsedRecord> ParseRecord(absl::string_view bytes) {
  Decoder decoder(bytes);
  const uint32_t checksum = decoder.U32();
  const uint32_t length = decoder.U32();
  ParsedRecord record;
  record.sequence = decoder.U64();
  record.type = decoder.U8();
  record.payload = decoder.Take(length);
  if (!decoder.ok()) return std::nullopt;
  if (checksum != Crc32c(bytes.substr(4, kRecordHeaderBytes - 4 + length))) return std::nullopt;
  return record;
}

bool HasSyncMark(absl::string_view bytes, uint64_t sequence) {
  for (; bytes.size() >= kRecordHeaderBytes; bytes.remove_prefix(1)) {
    const absl::string_view candidate = bytes.substr(0, kRecordHeaderBytes);
    if (candidate.back() != static_cast<char>(kSyncMark)) continue;
    const std::optional<ParsedRecord> mark = ParseRecord(candidate);  // nullopt when it has a payload
    if (mark.has_value() && mark->sequence >= sequence) return true;
  }
  return false;
}

std::string LogSegmentPath(absl::string_view dir, uint64_t first_sequence) {
  return JoinPath(dir, absl::StrCat(absl::Dec(first_sequence, absl::kZeroPad20), kLogSegmentSuffix));
}

absl::StatusOr<LogContents> ReadLog(FileSystem& fs, const std::string& dir, const LogReplay& replay) {
  return Reader(fs, dir, replay).Read();
}

}  // namespace precondor::store

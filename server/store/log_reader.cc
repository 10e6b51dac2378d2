// SPDX-License-Identifier: Apache-2.0
#include "server/store/log_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/status_macros.h"
#include "server/store/record_log_format.h"

namespace precondor::store {
namespace {

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

std::string LogSegmentPath(absl::string_view dir, uint64_t first_sequence) {
  return JoinPath(dir, absl::StrCat(absl::Dec(first_sequence, absl::kZeroPad20), kLogSegmentSuffix));
}

absl::StatusOr<LogContents> ReadLog(FileSystem& fs, const std::string& dir, const LogReplay& replay) {
  return Reader(fs, dir, replay).Read();
}

}  // namespace precondor::store

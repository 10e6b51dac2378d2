// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/coordinator_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"

namespace precondor::recovery {
namespace {

// Types of the log's records: the kind of a coordinator's record, or one of these.
constexpr uint8_t kCompactionBegins = 64;
constexpr uint8_t kCompactionEnds = 65;  // payload: number of records since the begin mark
constexpr uint8_t kCompacted = 128;      // plus the kind of a record in a compaction

// Builds the list of records from the log.
class Replayer {
 public:
  absl::Status Take(const store::Record& record) {
    if (first_sequence_ == 0) first_sequence_ = record.sequence;
    if (record.type == kCompactionBegins) {
      begun_ = true;
      compaction_.clear();
      compaction_bytes_ = 0;
      return absl::OkStatus();
    }
    if (record.type == kCompactionEnds) return EndCompaction(record);
    const bool compacted = record.type >= kCompacted;
    const auto kind = static_cast<uint8_t>(record.type - (compacted ? kCompacted : 0));
    absl::StatusOr<CoordinatorRecord> decoded = DecodeCoordinatorRecord(kind, record.payload);
    if (!decoded.ok()) {
      return absl::Status(decoded.status().code(),
                          absl::StrCat("record ", record.sequence, ": ", decoded.status().message()));
    }
    (compacted ? compaction_ : records_).push_back(*std::move(decoded));
    (compacted ? compaction_bytes_ : bytes_since_) += record.payload.size();
    return absl::OkStatus();
  }
  absl::Status Finish() const {
    if (first_sequence_ <= 1 || whole_) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("begins with record ", first_sequence_, " and has no whole compaction; what came before is gone"));
  }
  std::vector<CoordinatorRecord>& records() { return records_; }
  uint64_t compacted_bytes() const { return compacted_bytes_; }
  uint64_t bytes_since() const { return bytes_since_; }

 private:
  absl::Status EndCompaction(const store::Record& record) {
    // The beginning of this older compaction was removed with earlier segments.
    if (!begun_) return absl::OkStatus();
    Decoder decoder(record.payload);
    const uint64_t count = decoder.U64();
    if (!decoder.done() || count != compaction_.size()) {
      return absl::DataLossError(
          absl::StrCat("record ", record.sequence, ": a compaction of ", count, " records has ", compaction_.size()));
    }
    records_ = std::exchange(compaction_, {});
    compacted_bytes_ = compaction_bytes_;
    bytes_since_ = 0;
    begun_ = false;
    whole_ = true;
    return absl::OkStatus();
  }

  uint64_t first_sequence_ = 0;
  std::vector<CoordinatorRecord> records_;
  bool begun_ = false;                         // a compaction has begun and not ended
  bool whole_ = false;                         // the log has a complete compaction
  std::vector<CoordinatorRecord> compaction_;  // records of the compaction that has begun
  uint64_t compaction_bytes_ = 0;
  uint64_t compacted_bytes_ = 0;
  uint64_t bytes_since_ = 0;
};

}  // namespace

absl::StatusOr<CoordinatorLog::Opened> CoordinatorLog::Open(store::FileSystem& fs, std::string dir,
                                                            const CoordinatorLogOptions& options) {
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs, dir));
  std::unique_ptr<CoordinatorLog> journal(new CoordinatorLog(fs, std::move(dir), options));
  PRECONDOR_ASSIGN_OR_RETURN(journal->lock_, fs.Lock(store::JoinPath(journal->dir_, "LOCK")));
  PRECONDOR_ASSIGN_OR_RETURN(std::vector<CoordinatorRecord> records, journal->OpenLog());
  return Opened{std::move(journal), std::move(records)};
}

absl::StatusOr<std::vector<CoordinatorRecord>> CoordinatorLog::OpenLog() {
  if (log_ != nullptr) durable_before_ = log_->synced_before();
  log_ = nullptr;  // releases the log's lock
  Replayer replayer;
  const auto take = [&replayer, this](const store::Record& record) {
    const absl::Status taken = replayer.Take(record);
    return taken.ok() ? taken : absl::Status(taken.code(), absl::StrCat(dir_, ": ", taken.message()));
  };
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<store::RecordLog> log,
                             store::RecordLog::Open(fs_, store::JoinPath(dir_, "log"), options_.log, take));
  if (const absl::Status finished = replayer.Finish(); !finished.ok()) {
    return absl::Status(finished.code(), absl::StrCat(dir_, ": ", finished.message()));
  }
  if (log->next_sequence() < durable_before_) {
    return absl::DataLossError(absl::StrCat(dir_, ": ends with record ", log->next_sequence() - 1, ", expected ",
                                            durable_before_ - 1, ", which was durable; were its files removed?"));
  }
  log_ = std::move(log);
  compacted_bytes_ = replayer.compacted_bytes();
  bytes_since_ = replayer.bytes_since();
  return std::move(replayer.records());
}

absl::Status CoordinatorLog::OpenAgainIfBroken() {
  if (log_ != nullptr && log_->health().ok()) return absl::OkStatus();
  doubtful_ = true;
  return OpenLog().status();
}

absl::Status CoordinatorLog::Write(uint8_t type, const std::string& bytes) {
  return log_->Append(type, bytes).status();
}

absl::Status CoordinatorLog::Append(const CoordinatorRecord& record) {
  PRECONDOR_RETURN_IF_ERROR(OpenAgainIfBroken());
  PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, EncodeCoordinatorRecord(record));
  PRECONDOR_RETURN_IF_ERROR(Write(KindOf(record), bytes));
  bytes_since_ += bytes.size();
  return log_->Sync();
}

absl::Status CoordinatorLog::WriteCompaction(absl::Span<const CoordinatorRecord> records) {
  uint64_t written_bytes = 0;
  PRECONDOR_RETURN_IF_ERROR(Write(kCompactionBegins, ""));
  for (const CoordinatorRecord& record : records) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, EncodeCoordinatorRecord(record));
    PRECONDOR_RETURN_IF_ERROR(Write(static_cast<uint8_t>(kCompacted + KindOf(record)), bytes));
    written_bytes += bytes.size();
  }
  std::string count;
  PutU64(count, records.size());
  PRECONDOR_RETURN_IF_ERROR(Write(kCompactionEnds, count));
  PRECONDOR_RETURN_IF_ERROR(log_->Sync());
  compacted_bytes_ = written_bytes;
  bytes_since_ = 0;
  return absl::OkStatus();
}

absl::Status CoordinatorLog::Compact(absl::Span<const CoordinatorRecord> records) {
  PRECONDOR_RETURN_IF_ERROR(OpenAgainIfBroken());
  const uint64_t begin = log_->next_sequence();
  // Otherwise wants_compaction() would return true at every append until a compaction succeeds.
  bytes_since_ = 0;
  PRECONDOR_RETURN_IF_ERROR(WriteCompaction(records));
  doubtful_ = false;
  // The older segments are not needed. If this fails, the next compaction removes them.
  return log_->DropBefore(begin);
}

bool CoordinatorLog::wants_compaction() const {
  return doubtful_ || bytes_since_ > std::max(options_.compact_bytes, 4 * compacted_bytes_);
}

}  // namespace precondor::recovery

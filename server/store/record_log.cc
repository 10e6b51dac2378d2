// SPDX-License-Identifier: Apache-2.0
#include "server/store/record_log.h"

#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/store/log_reader.h"

namespace precondor::store {
absl::StatusOr<std::unique_ptr<RecordLog>> RecordLog::Open(FileSystem& fs, std::string dir,
                                                           const RecordLogOptions& options, const LogReplay& replay) {
  if (options.max_record_bytes > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(dir, ": max_record_bytes is ", options.max_record_bytes,
                                                   ", the format allows ", std::numeric_limits<uint32_t>::max()));
  }
  PRECONDOR_RETURN_IF_ERROR(MakeDirDurably(fs, dir));
  std::unique_ptr<RecordLog> log(new RecordLog(fs, std::move(dir), options));
  PRECONDOR_ASSIGN_OR_RETURN(log->lock_, fs.Lock(JoinPath(log->dir_, "LOCK")));
  {
    MutexLock lock(log->mu_);
    PRECONDOR_RETURN_IF_ERROR(log->Recover(replay));
  }
  return log;
}

absl::Status RecordLog::RemoveUnfinished() {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.List(dir_));
  for (const std::string& name : names) {
    if (absl::EndsWith(name, kLogUnfinishedSuffix)) PRECONDOR_RETURN_IF_ERROR(fs_.RemoveFile(JoinPath(dir_, name)));
  }
  return absl::OkStatus();
}

absl::Status RecordLog::Recover(const LogReplay& replay) {
  PRECONDOR_RETURN_IF_ERROR(RemoveUnfinished());
  PRECONDOR_ASSIGN_OR_RETURN(LogContents found, ReadLog(fs_, dir_, replay));
  next_sequence_ = found.segments.empty() ? options_.first_sequence : found.next_sequence;
  torn_bytes_ = found.torn_bytes;
  segments_ = std::move(found.segments);
  synced_before_ = next_sequence_;
  // The last segment is rewritten: bytes that were read from it may never have reached the disk (a sync that failed
  // before), and a sync of the old file would not report that.
  if (segments_.empty()) {
    segments_.push_back({next_sequence_, 0});
    found.last = EncodeSegmentHeader(next_sequence_);
  }
  const std::string mark = EncodeRecordHeader(next_sequence_, kSyncMark, {});
  if (next_sequence_ > segments_.back().first_sequence && !absl::EndsWith(found.last, mark)) {
    found.last += mark;  // true once the file has its final name
  }
  segments_.back().size_bytes = found.last.size();
  return StartSegment(segments_.back().first_sequence, found.last);
}

// Writes the segment under a temporary name until it is synced: so a segment's header is never torn, and a replaced
// segment exists until its successor does.
absl::Status RecordLog::StartSegment(uint64_t first_sequence, absl::string_view contents) {
  const std::string path = LogSegmentPath(dir_, first_sequence);
  const std::string unfinished = absl::StrCat(path, kLogUnfinishedSuffix);
  PRECONDOR_ASSIGN_OR_RETURN(active_, fs_.Create(unfinished));
  PRECONDOR_RETURN_IF_ERROR(active_->Append(contents));
  PRECONDOR_RETURN_IF_ERROR(active_->Sync());
  PRECONDOR_RETURN_IF_ERROR(fs_.Rename(unfinished, path));
  return fs_.SyncDir(dir_);
}

absl::Status RecordLog::Write(uint64_t sequence, uint8_t type, absl::Span<const absl::string_view> payload) {
  const std::string header = EncodeRecordHeader(sequence, type, payload);
  std::vector<absl::string_view> pieces = {header};
  pieces.insert(pieces.end(), payload.begin(), payload.end());
  PRECONDOR_RETURN_IF_ERROR(active_->AppendPieces(pieces));
  for (const absl::string_view piece : pieces) segments_.back().size_bytes += piece.size();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> RecordLog::AppendPieces(uint8_t type, absl::Span<const absl::string_view> payload) {
  if (type == kSyncMark) {
    return absl::InvalidArgumentError(absl::StrCat(dir_, ": record type 0 is the log's own, expected 1 to 255"));
  }
  uint64_t bytes = 0;
  for (const absl::string_view piece : payload) bytes += piece.size();
  if (bytes > options_.max_record_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(dir_, ": record of ", bytes, " bytes, at most ", options_.max_record_bytes));
  }
  MutexLock lock(mu_);
  PRECONDOR_RETURN_IF_ERROR(poison_);
  if (segments_.back().size_bytes >= options_.segment_bytes && next_sequence_ > segments_.back().first_sequence) {
    PRECONDOR_RETURN_IF_ERROR(Rotate(options_.segment_bytes));
  }
  if (const absl::Status written = Write(next_sequence_, type, payload); !written.ok()) return Poison(written);
  return next_sequence_++;
}

absl::Status RecordLog::BeginSegmentAt(uint64_t bytes) {
  MutexLock lock(mu_);
  if (!poison_.ok() || next_sequence_ == segments_.back().first_sequence) return poison_;
  return segments_.back().size_bytes < bytes ? absl::OkStatus() : Rotate(bytes);
}

// Begins a new segment after one of at least `bytes`.
absl::Status RecordLog::Rotate(uint64_t bytes) {
  while (syncing_) synced_.wait(mu_);
  PRECONDOR_RETURN_IF_ERROR(poison_);
  if (segments_.back().size_bytes < bytes) return absl::OkStatus();  // another thread has rotated
  absl::Status status = active_->Sync();
  if (status.ok()) {
    synced_before_ = next_sequence_;
    if (options_.drop_cached) active_->DropCached(segments_.back().size_bytes);
    status = active_->Close();
  }
  const std::string header = EncodeSegmentHeader(next_sequence_);
  if (status.ok()) status = StartSegment(next_sequence_, header);
  if (!status.ok()) return Poison(status);
  segments_.push_back({next_sequence_, header.size()});
  return absl::OkStatus();
}

absl::Status RecordLog::Sync() {
  MutexLock lock(mu_);
  return SyncLocked();
}

// Releases mu_ during the sync, so that other threads can append and drop.
absl::Status RecordLog::SyncLocked() {
  const uint64_t wanted = next_sequence_;
  while (syncing_ && poison_.ok() && synced_before_ < wanted) synced_.wait(mu_);
  if (!poison_.ok() || synced_before_ >= wanted) return poison_;
  syncing_ = true;
  const uint64_t covered = next_sequence_;
  WritableFile* const file = active_.get();
  const uint64_t bytes = segments_.back().size_bytes;
  mu_.Unlock();

  absl::Status status = file->Sync();
  if (status.ok() && options_.drop_cached) file->DropCached(bytes);

  mu_.Lock();
  syncing_ = false;
  if (status.ok()) {
    synced_before_ = covered;
    // The records are durable even if the mark fails, but nothing must be appended after half a mark.
    if (poison_.ok()) {
      if (const absl::Status marked = Write(covered, kSyncMark, {}); !marked.ok()) Poison(marked).IgnoreError();
    }
  } else {
    status = Poison(status);
  }
  synced_.notify_all();
  return status;
}

absl::Status RecordLog::DropBefore(uint64_t sequence) {
  MutexLock lock(mu_);
  while (segments_.size() > 1 && segments_[1].first_sequence <= sequence) {
    absl::Status removed = fs_.RemoveFile(LogSegmentPath(dir_, segments_.front().first_sequence));
    if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
    // One at a time: if a crash restored an earlier segment but not a later one, the log would have a gap.
    PRECONDOR_RETURN_IF_ERROR(fs_.SyncDir(dir_));
    segments_.erase(segments_.begin());
  }
  return absl::OkStatus();
}

absl::Status RecordLog::Poison(const absl::Status& error) {
  if (poison_.ok()) {
    poison_ = absl::Status(error.code(),
                           absl::StrCat("log ", LogSegmentPath(dir_, segments_.back().first_sequence), " at offset ",
                                        segments_.back().size_bytes, " must be opened again: ", error.message()));
  }
  return poison_;
}

absl::Status RecordLog::health() const {
  MutexLock lock(mu_);
  return poison_;
}

uint64_t RecordLog::first_sequence() const {
  MutexLock lock(mu_);
  return segments_.front().first_sequence;
}

uint64_t RecordLog::next_sequence() const {
  MutexLock lock(mu_);
  return next_sequence_;
}

uint64_t RecordLog::synced_before() const {
  MutexLock lock(mu_);
  return synced_before_;
}

uint64_t RecordLog::size_bytes() const {
  MutexLock lock(mu_);
  uint64_t sum = 0;
  for (const LogSegment& segment : segments_) sum += segment.size_bytes;
  return sum;
}

}  // namespace precondor::store

// SPDX-License-Identifier: Apache-2.0
// An append-only log of opaque records in the segment files of one directory. docs/operate/storage.md describes the
// format.
//
// After a crash Open replays a prefix of the appended records: every record that a successful Sync covered, in order,
// and possibly later ones. It never replays anything else.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "server/store/file_system.h"
#include "server/store/log_reader.h"

namespace precondor::store {

struct RecordLogOptions {
  uint64_t segment_bytes = uint64_t{64} << 20;      // a segment of at least this length is followed by a new one
  uint64_t max_record_bytes = uint64_t{256} << 20;  // of a payload; at most 2^32 - 1
  uint64_t first_sequence = 1;                      // of a log without files, such as one whose files were removed
  // For a log that is written often and read only after a crash: drops synced bytes from the page cache, so that the
  // next records reuse its memory.
  bool drop_cached = false;
};

// Owned by one component. A lock file keeps other processes and other logs out of the directory.
// Threads: starts none; calls may overlap. An Append waits for a running Sync only if it must begin a new segment.
// Several Appends share one Sync (group commit).
//
// A failed Append, Sync or rotation poisons the log: all later Appends and Syncs return the first error. A retry is not
// possible: after a failed fsync Linux marks the lost pages clean, so that the next fsync succeeds without them, and a
// failed append leaves part of a record in the file. Destroy the log and Open it again, which copies the intact records
// into a new file.
class RecordLog {
 public:
  // Creates `dir` (its parent must exist), takes its lock, replays the records, and starts a segment that is safe to
  // append to. Cuts off the end of the last segment if a crash has torn it (torn_bytes). After an error the caller must
  // discard what `replay` got. `fs` must outlive the log.
  // Errors: DataLoss damage or a gap, with file and offset; FailedPrecondition directory in use, or a newer format;
  //         InvalidArgument max_record_bytes is too large; those of FileSystem.
  static absl::StatusOr<std::unique_ptr<RecordLog>> Open(FileSystem& fs, std::string dir,
                                                         const RecordLogOptions& options, const LogReplay& replay);

  // Returns the record's sequence. Syncs if a segment is full. Returns InvalidArgument, without poisoning the log, for
  // type 0 and for a payload over max_record_bytes.
  absl::StatusOr<uint64_t> Append(uint8_t type, absl::string_view payload) { return AppendPieces(type, {&payload, 1}); }
  // Appends a record whose payload is the concatenation of the pieces, which are not copied together first.
  absl::StatusOr<uint64_t> AppendPieces(uint8_t type, absl::Span<const absl::string_view> payload);
  // After OK, every record whose Append returned before this call survives a crash of the machine.
  absl::Status Sync();
  // Begins a new segment if the current one has records and at least `bytes`, as an Append does at segment_bytes. For a
  // log whose appends must not wait for that.
  absl::Status BeginSegmentAt(uint64_t bytes);
  // Removes the segments that contain only records below `sequence`, except the last segment. Open may therefore still
  // replay some of these records. Also works on a poisoned log, where it frees space on a full disk. An error does not
  // poison the log, and the call can be repeated.
  absl::Status DropBefore(uint64_t sequence);

  absl::Status health() const;                         // OK, or the error that poisoned the log
  uint64_t first_sequence() const;                     // next_sequence() if the log is empty
  uint64_t next_sequence() const;                      // sequence of the next Append
  uint64_t synced_before() const;                      // records below this survive a crash of the machine
  uint64_t size_bytes() const;                         // total size of all segments
  uint64_t torn_bytes() const { return torn_bytes_; }  // number of bytes that Open cut off

 private:
  RecordLog(FileSystem& fs, std::string dir, const RecordLogOptions& options)
      : fs_(fs), dir_(std::move(dir)), options_(options) {}
  absl::Status Recover(const LogReplay& replay) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RemoveUnfinished();
  // `contents`: the contents of the last segment.
  absl::Status StartSegment(uint64_t first_sequence, absl::string_view contents) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status SyncLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Rotate(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Write(uint64_t sequence, uint8_t type, absl::Span<const absl::string_view> payload)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Poison(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after Open.
  FileSystem& fs_;
  const std::string dir_;
  const RecordLogOptions options_;
  std::unique_ptr<FileLock> lock_;
  uint64_t torn_bytes_ = 0;

  // Held while an append runs, so that records are in the order of their sequences; released while a Sync runs.
  mutable Mutex mu_;
  CondVar synced_;
  bool syncing_ ABSL_GUARDED_BY(mu_) = false;              // if true, active_ must not change
  std::vector<LogSegment> segments_ ABSL_GUARDED_BY(mu_);  // ascending; the last one is appended to
  std::unique_ptr<WritableFile> active_ ABSL_GUARDED_BY(mu_);
  absl::Status poison_ ABSL_GUARDED_BY(mu_);
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t synced_before_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace precondor::store

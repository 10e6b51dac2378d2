// SPDX-License-Identifier: Apache-2.0
// An append-only log of opaque records in the segment files of one directory; bytes in docs/storage.md.
//
// After a crash Open gives back a prefix of what was appended: every record that a successful Sync covered, in order,
// and perhaps some that none covered. Nothing else is ever handed out.
#pragma once

#include <atomic>
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
#include "server/store/ring_writer.h"

namespace precondor::store {

struct RecordLogOptions {
  uint64_t segment_bytes = uint64_t{64} << 20;      // a segment this long is followed by a new one
  uint64_t max_record_bytes = uint64_t{256} << 20;  // of a payload; at most 2^32 - 1
  // Of a log that is written much and read after a crash alone: what is synced leaves the system's memory, which the
  // next records then use again.
  bool drop_cached = false;
  // Not 0: a file of so many bytes (a multiple of 4096, at least 16 Ki) is kept in memory, where an append is a copy;
  // Sync brings records from there to the segments. Where the file system cannot do it, an append is a write, as with
  // 0.
  uint64_t ring_bytes = 0;
};

// Owner: one component; a lock file keeps other processes and logs out of the directory.
// Threads: none of its own; calls may overlap. An Append does not wait for a Sync under way, unless it has to begin a
// new segment, or with a ring that is full, which it then empties itself; several Appends share the cost of one Sync
// (group commit).
//
// A failed Append, Sync or rotation poisons the log: all later Appends and Syncs return the first error. It must not be
// retried: after a failed fsync Linux marks the lost pages clean, so that the next fsync succeeds without them, and a
// failed append leaves part of a record in the way. Destroy the log and Open it again, which copies what is whole into
// a new file.
class RecordLog {
 public:
  // Makes `dir` (its parent must exist), takes its lock, replays, and starts a segment that is safe to append to.
  // The end of the last segment, torn by a crash, is cut off (torn_bytes). What was replayed before an error must be
  // thrown away. `fs` must outlive the log.
  // Errors: DataLoss damage or a gap, with file and offset; FailedPrecondition directory in use, or a newer format;
  //         those of FileSystem.
  static absl::StatusOr<std::unique_ptr<RecordLog>> Open(FileSystem& fs, std::string dir,
                                                         const RecordLogOptions& options, const LogReplay& replay);

  // Returns the record's sequence. May sync, when a segment is full. InvalidArgument, without poison: type 0, or a
  // payload over max_record_bytes.
  absl::StatusOr<uint64_t> Append(uint8_t type, absl::string_view payload) { return AppendPieces(type, {&payload, 1}); }
  // The payload is the pieces one after the other; they are written from where they are.
  absl::StatusOr<uint64_t> AppendPieces(uint8_t type, absl::Span<const absl::string_view> payload);
  // After OK every record whose Append had returned before the call survives a crash.
  absl::Status Sync();
  // The records below `sequence` are no longer needed: removes the segments that hold nothing else, never the last one,
  // so that Open may still replay some of them. Works on a poisoned log too, where it frees a full disk; an error
  // does not poison and the call may be repeated.
  absl::Status DropBefore(uint64_t sequence);

  // There is a ring, and appends may soon have to wait for a Sync.
  bool crowded() const { return crowded_.load(std::memory_order_relaxed); }
  bool has_ring() const { return has_ring_; }
  const absl::Status& why_no_ring() const { return why_no_ring_; }  // OK: there is one, or none was asked for

  absl::Status health() const;                         // OK, or the error that poisoned the log
  uint64_t first_sequence() const;                     // next_sequence() when the log is empty
  uint64_t next_sequence() const;                      // that the next Append gives
  uint64_t synced_before() const;                      // records below this survive a crash
  uint64_t size_bytes() const;                         // of all segments
  uint64_t torn_bytes() const { return torn_bytes_; }  // cut off by Open

 private:
  RecordLog(FileSystem& fs, std::string dir, const RecordLogOptions& options)
      : fs_(fs), dir_(std::move(dir)), options_(options) {}
  absl::Status Recover(const LogReplay& replay) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RemoveUnfinished();
  // `contents`: of the last segment.
  absl::Status BeginWriting(absl::string_view contents) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status StartSegment(uint64_t first_sequence, absl::string_view contents) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AwaitRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status WriteThrough(absl::Span<const absl::string_view> pieces) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status SyncLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Rotate() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Write(uint64_t sequence, uint8_t type, absl::Span<const absl::string_view> payload)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Poison(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after Open.
  FileSystem& fs_;
  const std::string dir_;
  const RecordLogOptions options_;
  std::unique_ptr<FileLock> lock_;
  uint64_t torn_bytes_ = 0;
  bool has_ring_ = false;
  absl::Status why_no_ring_;
  std::atomic<bool> crowded_ = false;

  // Held while the system takes an append, which keeps records in the order of their sequences; not during a Sync.
  mutable Mutex mu_;
  CondVar synced_;
  bool syncing_ ABSL_GUARDED_BY(mu_) = false;                  // meanwhile active_ stays what it is
  std::vector<LogSegment> segments_ ABSL_GUARDED_BY(mu_);      // ascending, the last is the one appended to
  std::unique_ptr<WritableFile> active_ ABSL_GUARDED_BY(mu_);  // without a ring
  std::unique_ptr<RingWriter> ring_ ABSL_GUARDED_BY(mu_);      // or with one
  absl::Status poison_ ABSL_GUARDED_BY(mu_);
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t synced_before_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace precondor::store

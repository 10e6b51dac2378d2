// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal on a disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/core/coordinator/coordinator_journal.h"
#include "server/store/file_system.h"
#include "server/store/record_log.h"

namespace precondor::store {

struct CoordinatorLogOptions {
  uint64_t compact_bytes = uint64_t{4} << 20;  // a compaction pays after so many bytes, and four times its own size
  RecordLogOptions log = {.segment_bytes = uint64_t{1} << 20};
};

// One record of the log for each of the coordinator's, synced before Append returns. A compaction is appended as well,
// between a mark for its beginning and one for its end; it counts from the end mark on, and the segments before it go.
//
// When the disk fails or is full, Append fails, and the next one opens the log again: the coordinator goes on by itself
// once there is room. The record that failed may then be in the log, so that a compaction is asked for.
// Threads: one caller at a time.
class CoordinatorLog final : public CoordinatorJournal {
 public:
  struct Opened {
    std::unique_ptr<CoordinatorLog> journal;
    std::vector<CoordinatorRecord> records;  // in order, from the last compaction on: for Coordinator::Restore
  };
  // Makes `dir` (its parent must exist). `fs` must outlive the log. Errors: those of RecordLog::Open; DataLoss or
  // FailedPrecondition for a record that does not decode.
  static absl::StatusOr<Opened> Open(FileSystem& fs, std::string dir, const CoordinatorLogOptions& options = {});

  absl::Status Append(const CoordinatorRecord& record) override;
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override;
  bool wants_compaction() const override;

 private:
  CoordinatorLog(FileSystem& fs, std::string dir, const CoordinatorLogOptions& options)
      : fs_(fs), dir_(std::move(dir)), options_(options) {}
  absl::StatusOr<std::vector<CoordinatorRecord>> OpenLog();
  absl::Status Write(uint8_t type, const std::string& bytes);
  absl::Status WriteCompaction(absl::Span<const CoordinatorRecord> records);
  absl::Status OpenAgainIfBroken();

  FileSystem& fs_;
  const std::string dir_;
  const CoordinatorLogOptions options_;
  std::unique_ptr<FileLock> lock_;  // also while the log is opened again, so that no other process gets in between
  std::unique_ptr<RecordLog> log_;  // null while it cannot be opened again
  uint64_t compacted_bytes_ = 0;    // of the last compaction
  uint64_t bytes_since_ = 0;        // appended after it
  uint64_t durable_before_ = 1;     // records that the log had when it was last opened again
  bool doubtful_ = false;           // the log may hold a record whose Append failed
};

}  // namespace precondor::store

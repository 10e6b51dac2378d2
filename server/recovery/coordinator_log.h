// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal in a directory of the local disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/core/api/coordinator_journal.h"
#include "server/store/file_system.h"
#include "server/store/record_log.h"

namespace precondor::recovery {

struct CoordinatorLogOptions {
  // Compaction is due once more than this, and than 4 times the last compaction, has been appended after it.
  uint64_t compact_bytes = uint64_t{4} << 20;
  store::RecordLogOptions log = {.segment_bytes = uint64_t{1} << 20};
};

// Keeps the coordinator's records in a record log, one log record each, and syncs each before Append returns. A
// compaction is also appended, between a begin mark and an end mark. It replaces the records before it once the end
// mark is written; the segments before it are then removed.
//
// If the disk fails or is full, Append fails, and the next call opens the log again, so that the coordinator recovers
// without a restart once there is space. The log may contain the record whose Append failed; therefore
// wants_compaction() then returns true.
// Threads: calls must not overlap.
class CoordinatorLog final : public CoordinatorJournal {
 public:
  struct Opened {
    std::unique_ptr<CoordinatorLog> journal;
    std::vector<CoordinatorRecord> records;  // in order, starting with the last compaction; for Coordinator::Restore
  };
  // Creates `dir` (its parent must exist) and opens the log in it. `fs` must outlive the log. Errors: those of
  // RecordLog::Open; DataLoss or FailedPrecondition for a record that cannot be decoded.
  static absl::StatusOr<Opened> Open(store::FileSystem& fs, std::string dir, const CoordinatorLogOptions& options = {});

  absl::Status Append(const CoordinatorRecord& record) override;
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override;
  bool wants_compaction() const override;

 private:
  CoordinatorLog(store::FileSystem& fs, std::string dir, const CoordinatorLogOptions& options)
      : fs_(fs), dir_(std::move(dir)), options_(options) {}
  absl::StatusOr<std::vector<CoordinatorRecord>> OpenLog();
  absl::Status Write(uint8_t type, const std::string& bytes);
  absl::Status WriteCompaction(absl::Span<const CoordinatorRecord> records);
  absl::Status OpenAgainIfBroken();

  store::FileSystem& fs_;
  const std::string dir_;
  const CoordinatorLogOptions options_;
  std::unique_ptr<store::FileLock>
      lock_;  // kept while the log is opened again, so that no other process can take the directory
  std::unique_ptr<store::RecordLog> log_;  // null after a failed attempt to open it again
  uint64_t compacted_bytes_ = 0;           // size of the last compaction
  uint64_t bytes_since_ = 0;               // appended after the last compaction
  uint64_t durable_before_ = 1;            // records below this were durable when the log was last opened again
  bool doubtful_ = false;                  // the log may contain a record whose Append failed
};

}  // namespace precondor::recovery

// SPDX-License-Identifier: Apache-2.0
// Writes a coordinator's journal: one record at a time, each adopted before the next is written.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/observer.h"

namespace precondor {

// Thread-safe. Its lock is taken before the locks that the callbacks take.
class JournalWriter {
 public:
  // `all` returns the records of all sessions in their current state, for a compaction. All references must outlive the
  // object.
  JournalWriter(CoordinatorJournal& journal, std::function<std::vector<CoordinatorRecord>()> all, Logger& logger,
                Observer& observer);

  // Returns the fencing token with which this process begins to lead. It is the storage's, or is made from `wall`,
  // greater than `last`, and written to the journal. `last` is the greatest token in the journal. Returns UNAVAILABLE
  // if the token cannot be written.
  absl::StatusOr<uint64_t> BeginToLead(uint64_t last, absl::Time wall);

  // Writes a record, and calls `adopt` once it is durable. No other record and no compaction is written in between.
  // Returns UNAVAILABLE if the write fails: the record may or may not exist, and `adopt` is not called.
  absl::Status Write(const CoordinatorRecord& record, absl::FunctionRef<void()> adopt);

 private:
  void Compact() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::function<std::vector<CoordinatorRecord>()> all_;
  Logger& logger_;
  Observer& observer_;

  Mutex mu_;
  CoordinatorJournal& journal_ ABSL_GUARDED_BY(mu_);
  uint64_t token_ ABSL_GUARDED_BY(mu_) = 0;  // written by this process; 0: none is needed
};

}  // namespace precondor

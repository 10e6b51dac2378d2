// SPDX-License-Identifier: Apache-2.0
// How a coordinator writes its journal: one record at a time, each adopted before the next is made.
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
#include "server/core/coordinator/coordinator_journal.h"
#include "server/core/observer.h"

namespace precondor {

// Thread-safe. Its lock is taken before those of the callbacks.
class JournalWriter {
 public:
  // `all`: adds the records of all sessions as they are, for a compaction. All references outlive this.
  JournalWriter(CoordinatorJournal& journal, std::function<void(std::vector<CoordinatorRecord>&)> all, Logger& logger,
                Observer& observer);

  // The fencing token with which this process begins to lead, greater than `last`, the greatest of the journal. It is
  // the storage's, or is made from `wall` and written down. Unavailable: it cannot be written down.
  absl::StatusOr<uint64_t> BeginToLead(uint64_t last, absl::Time wall);

  // Makes a record, writes it down, and calls `adopt` once it is durable. No other record is written, and no compaction
  // takes place, between the three. Unavailable: the record may or may not be there; `adopt` was not called.
  absl::Status Write(absl::FunctionRef<CoordinatorRecord()> make, absl::FunctionRef<void()> adopt);

 private:
  void Compact() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::function<void(std::vector<CoordinatorRecord>&)> all_;
  Logger& logger_;
  Observer& observer_;

  Mutex mu_;
  CoordinatorJournal& journal_ ABSL_GUARDED_BY(mu_);
  uint64_t token_ ABSL_GUARDED_BY(mu_) = 0;  // that the journal has of this process; 0: it needs none
};

}  // namespace precondor

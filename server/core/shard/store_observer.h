// SPDX-License-Identifier: Apache-2.0
// What a shard's journal on a disk (server/recovery) tells of its log, its snapshots and the factors that it keeps.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor {

// See Observer for how the calls come.
class StoreObserver {
 public:
  virtual ~StoreObserver() = default;
  // A shard's log took a record of so many bytes, or failed; a session cannot come back from it, or can again.
  virtual void OnLogAppend(int64_t bytes, bool ok) {}
  virtual void OnLogStale(absl::string_view train_job, bool stale) {}
  // One sync of the shard's log, and how many bytes its files then have.
  virtual void OnLogSync(absl::Duration took, int64_t log_bytes) {}
  // A snapshot was written just now: what it took, and its size. OnSnapshot follows.
  virtual void OnSnapshotWritten(absl::string_view train_job, absl::Duration took, int64_t bytes) {}
  // A session's snapshot became durable, or was given up.
  virtual void OnSnapshot(absl::string_view train_job, bool ok) {}
  // Released factors of a session became durable, or an attempt failed and will be made again.
  virtual void OnFactorsKept(absl::string_view train_job, bool ok) {}
};

}  // namespace precondor

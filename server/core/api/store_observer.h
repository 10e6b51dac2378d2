// SPDX-License-Identifier: Apache-2.0
// Events that a shard's journal on disk (server/recovery) reports about its log and snapshots.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor {

// Observer has the rules for calls. By default every method does nothing.
class StoreObserver {
 public:
  virtual ~StoreObserver() = default;
  // A record of so many bytes was appended to the shard's log, or failed. OnLogStale: a session cannot be restored from
  // the log, or can again.
  virtual void OnLogAppend(int64_t bytes, bool ok) {}
  virtual void OnLogStale(absl::string_view train_job, bool stale) {}
  // The journal lacks gradients of a session, so that a restart would bring it back with an older state, or has a
  // snapshot that holds them.
  virtual void OnGradientsMissing(absl::string_view train_job, bool missing) {}
  // The shard's log was synced; `log_bytes` is the size of its files afterwards.
  virtual void OnLogSync(absl::Duration took, int64_t log_bytes) {}
  // A snapshot was written: duration and size. OnSnapshot follows.
  virtual void OnSnapshotWritten(absl::string_view train_job, absl::Duration took, int64_t bytes) {}
  // A session's snapshot became durable, or was given up.
  virtual void OnSnapshot(absl::string_view train_job, bool ok) {}
};

}  // namespace precondor

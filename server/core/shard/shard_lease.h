// SPDX-License-Identifier: Apache-2.0
// For how long a shard may answer sessions whose layers the coordinator gives to others when it is lost: one that was
// stopped, or cut off, must not answer a step that others answer by now.
#pragma once

#include <algorithm>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// Thread-safe; mu_ is a leaf. Times are those of the shard's monotonic clock.
class ShardLeaseHolder {
 public:
  void Grant(const ShardLease& lease, absl::Time now) {
    if (lease.duration <= absl::ZeroDuration()) return;
    MutexLock lock(mu_);
    duration_ = lease.duration;
    // A clock that another machine had says nothing here.
    if (lease.from <= now) until_ = std::max(until_, lease.from + lease.duration);
  }
  // For a session that the coordinator installed at `installed`, InfinitePast: not since the shard began. It has heard
  // of the shard then, as with a grant. Before the first grant no coordinator takes layers away.
  bool Holds(absl::Time installed, absl::Time now) const {
    MutexLock lock(mu_);
    if (now < until_) return true;
    if (installed == absl::InfinitePast()) return false;
    return duration_ == absl::ZeroDuration() || now < installed + duration_;
  }

 private:
  mutable Mutex mu_;
  absl::Duration duration_ ABSL_GUARDED_BY(mu_) = absl::ZeroDuration();
  absl::Time until_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace precondor

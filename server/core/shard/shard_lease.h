// SPDX-License-Identifier: Apache-2.0
// How long a shard may answer sessions whose layers the coordinator moves to other shards when this one is lost. A
// shard that was suspended or cut off must not answer a step that another shard answers by then.
#pragma once

#include <algorithm>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// Thread-safe; mu_ is a leaf lock. Times are those of the shard's monotonic clock.
class ShardLeaseHolder {
 public:
  void Grant(const ShardLease& lease, absl::Time now) {
    if (lease.duration <= absl::ZeroDuration()) return;
    MutexLock lock(mu_);
    duration_ = lease.duration;
    // A `from` in the future was read from another machine's clock.
    if (lease.from <= now) until_ = std::max(until_, lease.from + lease.duration);
  }
  // Returns whether the shard may answer a session that the coordinator last installed at `installed`, or InfinitePast
  // if it has not since the process began. An install proves, like a grant, that the coordinator has reached the shard.
  // Before the first grant no coordinator moves layers away.
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

// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/shard_watch.h"

#include <algorithm>

namespace precondor {

ShardWatch::ShardWatch(size_t shards, absl::Duration loss_timeout, absl::Duration probe_interval, absl::Time now)
    : loss_timeout_(loss_timeout), probe_interval_(probe_interval), seen_(shards, {.answered = now}) {}

ShardLease ShardWatch::MakeLease(size_t shard) const {
  MutexLock lock(mu_);
  return {.from = seen_[shard].shard_time, .duration = loss_timeout_ / 2};
}

bool ShardWatch::NoteAnswer(size_t shard, absl::Time shard_time, absl::Time now) {
  MutexLock lock(mu_);
  Seen& seen = seen_[shard];
  const bool was_unreachable = seen.unanswered >= kLeastProbes;
  seen.silent = false;
  seen.answered = now;
  seen.unanswered = 0;
  seen.shard_time = shard_time;
  return was_unreachable;
}

bool ShardWatch::NoteSilence(size_t shard, absl::Time sent) {
  MutexLock lock(mu_);
  Seen& seen = seen_[shard];
  seen.silent = true;
  if (sent < seen.answered || sent - seen.counted < probe_interval_) return false;
  seen.counted = sent;
  return ++seen.unanswered == kLeastProbes;
}

void ShardWatch::Restart(absl::Time now) {
  MutexLock lock(mu_);
  for (Seen& seen : seen_) {
    seen.answered = now;
    seen.unanswered = 0;
  }
}

bool ShardWatch::IsLost(size_t shard, absl::Time now) const {
  const int64_t needed = std::max(kLeastProbes, absl::ToInt64Nanoseconds(absl::Ceil(loss_timeout_, probe_interval_)) /
                                                    absl::ToInt64Nanoseconds(probe_interval_));
  MutexLock lock(mu_);
  // The time counts too: until then the shard may answer under its lease (ShardLease).
  return seen_[shard].unanswered >= needed && now - seen_[shard].answered >= loss_timeout_;
}

bool ShardWatch::IsSilent(size_t shard) const {
  MutexLock lock(mu_);
  return seen_[shard].silent;
}

int64_t ShardWatch::unreachable() const {
  MutexLock lock(mu_);
  return std::count_if(seen_.begin(), seen_.end(), [](const Seen& seen) { return seen.unanswered >= kLeastProbes; });
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/shard_watch.h"

#include <algorithm>

namespace precondor {

ShardWatch::ShardWatch(size_t shards, absl::Duration probe_interval, absl::Time now)
    : probe_interval_(probe_interval), seen_(shards, {.answered = now}) {}

bool ShardWatch::NoteAnswer(size_t shard, absl::Time now) {
  Seen& seen = seen_[shard];
  const bool was_unreachable = seen.unanswered >= kLeastProbes;
  seen.silent = false;
  seen.answered = now;
  seen.unanswered = 0;
  return was_unreachable;
}

bool ShardWatch::NoteSilence(size_t shard, absl::Time sent) {
  Seen& seen = seen_[shard];
  seen.silent = true;
  if (sent < seen.answered || sent - seen.counted < probe_interval_) return false;
  seen.counted = sent;
  return ++seen.unanswered == kLeastProbes;
}

void ShardWatch::Restart(absl::Time now) {
  for (Seen& seen : seen_) {
    seen.answered = now;
    seen.unanswered = 0;
  }
}

int64_t ShardWatch::unreachable() const {
  return std::count_if(seen_.begin(), seen_.end(), [](const Seen& seen) { return seen.unanswered >= kLeastProbes; });
}

}  // namespace precondor

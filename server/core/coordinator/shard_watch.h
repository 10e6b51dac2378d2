// SPDX-License-Identifier: Apache-2.0
// When each shard of a coordinator last answered a probe: which shards are silent, and which are lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// Times are monotonic. Silence counts in probes that were sent, so that a coordinator that was stopped meanwhile takes
// nothing away. Thread-safe.
class ShardWatch {
 public:
  // Probes in a row that a shard leaves unanswered before it is reported; it is not lost before that either.
  static constexpr int64_t kLeastProbes = 3;

  // `loss_timeout`, `probe_interval`: see CoordinatorOptions. All shards count as heard of at `now`.
  ShardWatch(size_t shards, absl::Duration loss_timeout, absl::Duration probe_interval, absl::Time now);

  // What the next probe grants to the shard.
  ShardLease MakeLease(size_t shard) const;
  // The shard has answered a probe; `shard_time`: see ShardLease. True: it had been unreachable.
  bool NoteAnswer(size_t shard, absl::Time shard_time, absl::Time now);
  // The shard has not answered a probe of the time `sent`. True: it is unreachable from now on.
  bool NoteSilence(size_t shard, absl::Time sent);
  // A coordinator that stood by has not asked before: all shards count as heard of at `now`.
  void Restart(absl::Time now);

  // It has answered none of as many probes as fit into loss_timeout, nor anything for so long.
  bool IsLost(size_t shard, absl::Time now) const;
  // It did not answer the last probe.
  bool IsSilent(size_t shard) const;
  // Shards that leave kLeastProbes unanswered.
  int64_t unreachable() const;

 private:
  // When a shard was last heard of.
  struct Seen {
    absl::Time answered;  // by this process's clock; at first, when it began
    absl::Time shard_time = absl::InfinitePast();
    bool silent = false;     // the last probe was not answered
    int64_t unanswered = 0;  // probes sent since `answered` that were not, at least probe_interval apart
    absl::Time counted = absl::InfinitePast();  // when the last of them was sent
  };

  const absl::Duration loss_timeout_;
  const absl::Duration probe_interval_;

  mutable Mutex mu_;
  std::vector<Seen> seen_ ABSL_GUARDED_BY(mu_);  // by shard
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Tracks when each shard last answered a probe, and which shards are silent or unreachable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace precondor {

// Times are monotonic. Unanswered probes count, not time, so that a coordinator that was suspended treats no shard as
// unreachable. Not thread-safe.
class ShardWatch {
 public:
  // A shard is unreachable after this many unanswered probes in a row.
  static constexpr int64_t kLeastProbes = 3;

  // `probe_interval`: see CoordinatorOptions. All shards count as having answered at `now`.
  ShardWatch(size_t shards, absl::Duration probe_interval, absl::Time now);

  // Notes that the shard has answered a probe. Returns whether it was unreachable before.
  bool NoteAnswer(size_t shard, absl::Time now);
  // Notes that the shard has not answered a probe sent at `sent`. Returns whether it becomes unreachable with this one.
  bool NoteSilence(size_t shard, absl::Time sent);
  // Makes all shards count as having answered at `now`. Called when a standby begins to lead: it has sent no probes
  // before.
  void Restart(absl::Time now);

  // Returns whether the shard did not answer the last probe.
  bool IsSilent(size_t shard) const { return seen_[shard].silent; }
  // Returns the number of unreachable shards.
  int64_t unreachable() const;

 private:
  // State of the probes of one shard.
  struct Seen {
    absl::Time answered;  // by this process's clock; initially, when the watch began
    bool silent = false;  // the last probe was not answered
    // Number of unanswered probes since `answered`, counted at most once every probe_interval.
    int64_t unanswered = 0;
    // When the last counted probe was sent.
    absl::Time counted = absl::InfinitePast();
  };

  const absl::Duration probe_interval_;
  std::vector<Seen> seen_;  // by shard
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The faults of the cluster, besides those that the network brings to each message. To add one: write a function in
// fault_kinds.cc and a line in its table.
#pragma once

#include "absl/types/span.h"

namespace precondor::sim {

class World;

struct FaultKind {
  const char* name;
  // Now, in the middle of a run. What it breaks it mends itself after a while; World::Heal mends everything at the
  // scenario's horizon.
  void (*inflict)(World& world);
  // The process' memory is gone: a rank's copies for shards that come back, a shard's contributions. Only deterministic
  // trainers answer again as they did before.
  enum class Loses { kNothing, kRank, kShard } loses = Loses::kNothing;
};

absl::Span<const FaultKind> FaultKinds();
// A shard comes back with an empty disk; not in the table.
const FaultKind& ForgetsAShard();
// A shard is told to end, and started again; and one dies between two writes. Not in the table.
const FaultKind& DrainsAShard();
const FaultKind& KillsAShardThatWrites();

}  // namespace precondor::sim

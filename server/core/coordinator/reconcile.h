// SPDX-License-Identifier: Apache-2.0
// Compares what should be with what is: the coordinator's state with what a shard reports to hold. Pure functions;
// coordinator_shards.cc carries the actions out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/core/api/shard_control.h"
#include "server/core/coordinator/coordinator_state.h"

namespace precondor {

enum class ActionKind : uint8_t {
  // On one shard.
  kRemoveEnding,     // removes a session that ends
  kRemoveAbandoned,  // removes a session of this process whose Install was late
  kQuarantine,       // puts an unknown session in quarantine: another journal may have it
  kInstall,          // installs an open session, or tells all its shards the members
  // On all shards of a session.
  kClose,          // writes the CloseRecord of a session that every shard has removed
  kBeginSnapshot,  // begins a regular snapshot
  kAskForParts,    // asks for the parts of the snapshot under way
};

struct CoordinatorAction {
  ActionKind kind = ActionKind::kInstall;
  size_t shard = 0;
  uint64_t session_id = 0;
  std::string name = {};       // of the session; empty for kRemoveEnding and kClose
  int64_t reserved_bytes = 0;  // on the shard, of a session that is not known
  bool operator==(const CoordinatorAction&) const = default;
};

// Notes what the shard reports: sessions that it holds although they end, and the greatest steps.
void Observe(CoordinatorState& state, size_t shard, const ShardDescription& observed);

// Returns what clears the shard of sessions that the coordinator does not know. An id that is unknown stays unknown, so
// the actions stay right however late they are carried out.
std::vector<CoordinatorAction> ClearUnknown(const CoordinatorState& state, size_t shard,
                                            const ShardDescription& observed);

// Returns what makes the shard hold what it should, in the order in which to do it. Precondition: Observe.
std::vector<CoordinatorAction> ReconcileShard(const CoordinatorState& state, size_t shard,
                                              const ShardDescription& observed);

// Returns what is due for sessions as a whole. `snapshot_interval_steps`: see CoordinatorOptions.
std::vector<CoordinatorAction> ReconcileSessions(const CoordinatorState& state, uint64_t snapshot_interval_steps);

}  // namespace precondor

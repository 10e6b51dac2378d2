// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/reconcile.h"

#include <algorithm>
#include <iterator>

#include "absl/algorithm/container.h"

#include "server/core/coordinator/coordinator_session.h"

namespace precondor {
namespace {

// Returns what the shard reports of the session if that is up to date, or null.
const HeldSession* FindCurrent(const CoordinatorSession& session, size_t shard, const ShardDescription& observed) {
  const auto held =
      absl::c_find_if(observed.sessions, [id = session.id](const HeldSession& one) { return one.session_id == id; });
  // A shard whose disk has refused log records may have forgotten members in a restart. With another shard's data
  // directory it has that one's layers, and refuses the install.
  const bool current = held != observed.sessions.end() && held->epoch == session.members().epoch() &&
                       held->joined >= session.members().joined() &&
                       (held->layers.empty() || held->layers == session.placement[shard].layers);
  return current ? &*held : nullptr;
}

// A session without the factors that it was to begin with stays lost: no rank may train on fresh ones instead.
bool BelongsOn(const CoordinatorSession& session, size_t shard) {
  return !session.placement[shard].layers.empty() && !session.snapshots().RestoreFailed();
}

// Returns whether a regular snapshot is due: all ranks have joined, and the last snapshot is `interval_steps` old.
bool WantsSnapshot(const CoordinatorSession& session, uint64_t interval_steps) {
  return session.members().active() && session.progress().last_step() > 0 &&
         session.snapshots().IsDue(interval_steps, session.leases().first_open_step());
}

}  // namespace

void Observe(CoordinatorState& state, size_t shard, const ShardDescription& observed) {
  for (const HeldSession& held : observed.sessions) {
    // A delayed Install may have installed the session again.
    if (const auto ends = state.ending.find(held.session_id); ends != state.ending.end()) {
      ends->second.removed[shard] = false;
    }
  }
  for (const auto& [id, session] : state.open) {
    const HeldSession* held = BelongsOn(*session, shard) ? FindCurrent(*session, shard, observed) : nullptr;
    if (held != nullptr) session->NoteShardStep(shard, held->last_step);
  }
}

std::vector<CoordinatorAction> ClearUnknown(const CoordinatorState& state, size_t shard,
                                            const ShardDescription& observed) {
  std::vector<CoordinatorAction> actions;
  for (const HeldSession& held : observed.sessions) {
    if (state.Knows(held.session_id)) continue;
    const bool abandoned = state.abandoned.contains(held.session_id);
    actions.push_back({.kind = abandoned ? ActionKind::kRemoveAbandoned : ActionKind::kQuarantine,
                       .shard = shard,
                       .session_id = held.session_id,
                       .name = held.name,
                       .reserved_bytes = held.reserved_bytes});
  }
  return actions;
}

std::vector<CoordinatorAction> ReconcileShard(const CoordinatorState& state, size_t shard,
                                              const ShardDescription& observed) {
  std::vector<CoordinatorAction> actions;
  for (const auto& [id, one] : state.ending) {
    if (!one.removed[shard]) actions.push_back({.kind = ActionKind::kRemoveEnding, .shard = shard, .session_id = id});
  }
  absl::c_move(ClearUnknown(state, shard, observed), std::back_inserter(actions));
  for (const auto& [id, session] : state.open) {
    if (!BelongsOn(*session, shard)) continue;
    if (FindCurrent(*session, shard, observed) != nullptr && session->members().shards_told()) continue;
    actions.push_back({.kind = ActionKind::kInstall, .shard = shard, .session_id = id, .name = session->spec.name});
  }
  return actions;
}

std::vector<CoordinatorAction> ReconcileSessions(const CoordinatorState& state, uint64_t snapshot_interval_steps) {
  std::vector<CoordinatorAction> actions;
  for (const uint64_t id : state.RemovedEverywhere()) actions.push_back({.kind = ActionKind::kClose, .session_id = id});
  const auto closes = static_cast<std::ptrdiff_t>(actions.size());
  for (const auto& [id, session] : state.open) {
    const std::vector<SnapshotEntry>& snapshots = session->snapshots().list();
    const bool due = WantsSnapshot(*session, snapshot_interval_steps);
    if (!due && (snapshots.empty() || snapshots.back().state != SnapshotState::kUnderWay)) continue;
    actions.push_back({.kind = due ? ActionKind::kBeginSnapshot : ActionKind::kAskForParts,
                       .session_id = id,
                       .name = session->spec.name});
  }
  std::sort(actions.begin() + closes, actions.end(), [](const auto& x, const auto& y) { return x.name < y.name; });
  return actions;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_messages.h"

#include <utility>

#include "server/core/coordinator/coordinator_session.h"
#include "server/policy/lease.h"

namespace precondor {

SessionRecord MakeRecord(const CoordinatorSession& session) {
  return {.session_id = session.id,
          .spec = session.spec,
          .placement = session.placement,
          .membership = session.members().membership(),
          .lease = session.leases().durable(),
          .access = session.access};
}

EpochFence MakeFence(const CoordinatorSession& session) {
  return {.session_id = session.id, .epoch = session.members().epoch(), .members = session.members().Members()};
}

std::vector<SessionInstall> MakeInstalls(const CoordinatorSession& session) {
  const Membership& membership = session.members().membership();
  // Once a rank has had an answer, its RESUME tells the shard what is lost.
  const bool must_be_held = !session.progress().begun() && session.snapshots().HeldRestored().has_value();
  std::vector<SessionInstall> installs;
  for (const PlacedLayers& placed : session.placement) {
    installs.push_back({.session_id = session.id,
                        .epoch = membership.epoch,
                        .rollback_epoch = membership.rollback_epoch,
                        .rollback_step = membership.resume_step,
                        .spec = session.spec,
                        .layers = placed.layers,
                        .members = session.members().Members(),
                        .access = session.access,
                        .must_be_held = must_be_held});
  }
  return installs;
}

Directive MakeDirective(const CoordinatorSession& session) {
  const Membership& membership = session.members().membership();
  const StepLeases& leases = session.leases();
  const std::vector<SnapshotEntry>& snapshots = session.snapshots().list();
  // A snapshot is announced after EndSnapshotPlan: it may fail before that.
  const bool announced = !snapshots.empty() && snapshots.back().state != SnapshotState::kFailed &&
                         leases.held_before() != snapshots.back().step;
  return {.lease_through_step = leases.granted_through(),
          .modes = ModesBetween(leases.durable().schedule, 0, leases.granted_through()),
          .epoch = membership.epoch,
          .rollback_epoch = membership.rollback_epoch,
          .resume_step = membership.resume_step,
          .snapshot_at = announced ? snapshots.back().step : 0,
          .snapshot_number = announced ? snapshots.back().number : 0};
}

Mode LastMode(const CoordinatorSession& session) {
  return ModeAt(session.leases().durable().schedule, session.progress().last_step());
}

CoordinatorSessionSummary MakeSummary(const CoordinatorSession& session) {
  std::vector<ShardAssignment> shard_map;
  for (const PlacedLayers& placed : session.placement) {
    if (!placed.layers.empty()) shard_map.push_back({.address = placed.address, .layers = placed.layers});
  }
  return {.session_id = session.id,
          .spec = session.spec,
          .epoch = session.members().epoch(),
          .joined = session.members().joined(),
          .last_step = session.progress().last_step(),
          .shard_steps = session.progress().shard_steps(),
          .mode = LastMode(session),
          .loss = session.progress().last_loss(),
          .shard_map = std::move(shard_map),
          .decision = session.mode_policy().decision(),
          .modes = session.leases().durable().schedule,
          .forced = session.mode_policy().state().forced,
          .snapshots = session.snapshots().list()};
}

}  // namespace precondor

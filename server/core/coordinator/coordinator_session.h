// SPDX-License-Identifier: Apache-2.0
// A session as the coordinator sees it. Each part of its state is a class of its own; this class has the rules that
// need several of them, and the one way in which durable state changes. State and rules alone: talking to shards and
// writing down is the Coordinator's part. What others are told of a session: session_messages.h.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/coordinator/coordinator_journal.h"
#include "server/core/coordinator/coordinator_types.h"
#include "server/core/coordinator/mode_policy.h"
#include "server/core/coordinator/session_members.h"
#include "server/core/coordinator/session_placement.h"
#include "server/core/coordinator/session_snapshots.h"
#include "server/core/coordinator/step_leases.h"
#include "server/core/coordinator/step_progress.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// Not thread-safe: the Coordinator's lock guards it, but for id and spec, which are const, and the placement, which
// changes under the SessionLock and the mutex together, so that either is enough to read it.
//
// Nothing that others rely on changes before it is durable: a change is planned (Plan... of the session or of a part,
// BeginLeaseWrite), its record is written down without the lock, and then Adopt takes the record in. NoteInDoubt is for
// a record that may or may not have been written.
class CoordinatorSession {
 public:
  // `record.placement` has one entry a shard of the coordinator, in its order; those without layers are empty. `bytes`:
  // what it counts with in its tenants' limits.
  CoordinatorSession(SessionRecord record, uint64_t lease_steps, int64_t bytes = 0);

  uint64_t id() const { return id_; }
  const SessionSpec& spec() const { return spec_; }
  const SessionAccess& access() const { return access_; }
  int64_t bytes() const { return bytes_; }
  const SessionMembers& members() const { return members_; }
  const SessionPlacement& placement() const { return placement_; }
  const StepLeases& leases() const { return leases_; }
  const StepProgress& progress() const { return progress_; }
  const ModePolicy& mode_policy() const { return mode_policy_; }
  const SessionSnapshots& snapshots() const { return snapshots_; }
  // The session as it is, but for its snapshots.
  SessionRecord record() const;

  // --- what is durable --------------------------------------------------------------------------------------------
  // SessionMembers::PlanJoin. With a new epoch the job also goes back where the joining worker lacks factors that have
  // been released.
  absl::StatusOr<std::optional<Membership>> PlanJoin(uint32_t rank, uint64_t incarnation, uint64_t first_step) const;
  // Other shards have the layers from the next epoch on.
  SessionRecord PlanMove(std::vector<PlacedLayers> placement) const;
  // The record of a membership: while it is in doubt where the layers are, it says that as well.
  CoordinatorRecord PlanMembership(Membership next) const;
  // A snapshot as of the first step that no rank has been granted; no lease reaches it before EndSnapshotPlan. Errors:
  // SessionSnapshots::Plan.
  absl::StatusOr<SessionSnapshot> PlanSnapshot();
  void EndSnapshotPlan() { leases_.EndHold(); }
  // A lease to write down: a longer lease, or a change of mode from the first step that no rank has been granted.
  // Until Adopt, NoteInDoubt or StayInFirstOrder no lease grows into what it changes. nullopt: nothing to write, or one
  // is being written.
  std::optional<LeaseTerms> BeginLeaseWrite();
  // Instead of writing that lease down: the shards cannot hold the factors. Tried again a lease's steps later.
  void StayInFirstOrder();
  // A SessionRecord, MembershipRecord, LeaseRecord or SnapshotsRecord of this session is durable.
  void Adopt(CoordinatorRecord written);
  void NoteInDoubt(const CoordinatorRecord& record);

  // --- steps ------------------------------------------------------------------------------------------------------
  // Takes a report in; the step's loss when this report completed it. Errors: NotFound UNKNOWN_RANK,
  // FailedPrecondition STALE_EPOCH, STALE_INCARNATION, or STEP_TOO_FAR_AHEAD for a step that was never granted.
  absl::StatusOr<std::optional<LossTable::StepLoss>> Report(const StepReport& report, absl::Time now);
  // The lease is to reach beyond this step.
  void WantStep(uint64_t step) { leases_.WantStep(step); }
  // An operator's choice of the mode; nullopt gives it back to the policy.
  void Force(std::optional<Mode> mode) { mode_policy_.Force(mode); }

  // What the shard says of itself: the greatest step that it has begun.
  void NoteShardStep(size_t shard, uint64_t last_step) {
    progress_.NoteShard(placement_.shards()[shard].address, last_step);
  }

  // --- factors ----------------------------------------------------------------------------------------------------
  // Whether a step that some rank has yet to finish is in second order, or a probe of first order is under way.
  bool NeedsFactors() const;
  // What NeedsFactors says, with a version greater than any that this process made before.
  FactorHold MakeFactorHold();
  // SessionMembers::NoteShardsTold. True when the job rolled back with this membership from first order to steps in
  // second order: the shards may have released its factors.
  bool NoteShardsTold(const Membership& told);

 private:
  void AdoptMembership(Membership next);

  // Const after construction.
  const uint64_t id_;
  const SessionSpec spec_;
  const SessionAccess access_;
  const uint64_t lease_steps_;
  const int64_t bytes_;

  SessionMembers members_;
  SessionPlacement placement_;
  StepLeases leases_;
  StepProgress progress_;
  ModePolicy mode_policy_;
  SessionSnapshots snapshots_;
  bool rolled_back_ = false;  // to steps in second order, from first order, and not told to shards
  uint64_t hold_version_ = 0;
};

}  // namespace precondor

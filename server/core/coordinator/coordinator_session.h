// SPDX-License-Identifier: Apache-2.0
// The coordinator's state of one session. Each part of the state is a class of its own. This class has the rules that
// involve several parts, and the single way to change durable state. The Coordinator calls shards and writes the
// journal.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/coordinator_types.h"
#include "server/core/api/shard_control.h"
#include "server/core/coordinator/session_members.h"
#include "server/core/coordinator/session_snapshots.h"
#include "server/core/coordinator/step_leases.h"
#include "server/core/coordinator/step_progress.h"
#include "server/policy/fallback.h"

namespace precondor {

// Not thread-safe. The Coordinator's lock guards it, except its constants.
//
// State that others rely on does not change before the change is durable: a change is planned (Plan... of this class or
// of a part, BeginLeaseWrite), its record is written without the lock, and Adopt applies the record. NoteInDoubt
// handles a record that may or may not have been written.
class CoordinatorSession {
 public:
  // `record.placement` has one entry for each shard of the coordinator, in its order, without layers if the shard has
  // none.
  CoordinatorSession(SessionRecord record, uint64_t lease_steps);

  const uint64_t id;
  const SessionSpec spec;
  const SessionAccess access;
  const std::vector<PlacedLayers> placement;

  const SessionMembers& members() const { return members_; }
  const StepLeases& leases() const { return leases_; }
  const StepProgress& progress() const { return progress_; }
  // The mode that the session should have: the state of its fallback policy and the last decision. They run ahead of
  // the durable state: a decision takes effect once leases() has it in a durable lease.
  const FallbackDecision& decision() const { return decision_; }
  const SessionSnapshots& snapshots() const { return snapshots_; }

  // --- durable state ----------------------------------------------------------------------------------------------
  // Calls SessionMembers::PlanJoin. Returns INVALID_ARGUMENT (MALFORMED) also for a step far beyond the lease.
  absl::StatusOr<std::optional<Membership>> PlanJoin(uint32_t rank, uint64_t incarnation, uint64_t first_step) const;
  // Plans a snapshot as of the first step that has not been granted to any rank. No lease reaches that step before
  // EndSnapshotPlan. Returns the errors of SessionSnapshots::Plan.
  absl::StatusOr<SnapshotEntry> PlanSnapshot();
  void EndSnapshotPlan() { leases_.EndHold(); }
  // Returns a lease to write: a longer one, or a change of mode from the first step that has not been granted to any
  // rank. Until Adopt or NoteInDoubt, no step that it changes is granted. Returns nullopt if nothing has changed or a
  // lease is already being written.
  std::optional<LeaseTerms> BeginLeaseWrite();
  // Applies a MembershipRecord, LeaseRecord or SnapshotsRecord of this session that has become durable.
  void Adopt(CoordinatorRecord written);
  void NoteInDoubt(const CoordinatorRecord& record);

  // --- steps ------------------------------------------------------------------------------------------------------
  // Accepts a report. Returns the step's loss if this report completed the step. Returns NOT_FOUND (UNKNOWN_RANK),
  // FAILED_PRECONDITION: STALE_EPOCH, STALE_INCARNATION, or STEP_TOO_FAR_AHEAD if the step was never granted, or
  // INVALID_ARGUMENT (MALFORMED) for too many samples.
  absl::StatusOr<std::optional<LossTable::StepLoss>> Report(const StepReport& report, absl::Time now);
  // Requests a lease from the lowest step with which a rank begins, once all ranks are there. No step is made before,
  // and a rank alone could otherwise have leases that reach any step.
  void WantFirstSteps();
  // Sets the mode for an operator; nullopt returns the choice to the policy.
  void Force(std::optional<Mode> mode);

  // Notes the greatest step that the shard reports to have begun.
  void NoteShardStep(size_t shard, uint64_t last_step) { progress_.NoteShard(placement[shard].address, last_step); }

  // See SessionMembers::NoteShardsTold.
  void NoteShardsTold(const Membership& told) { members_.NoteShardsTold(told); }

 private:
  void AdoptMembership(Membership next);

  SessionMembers members_;
  StepLeases leases_;
  StepProgress progress_;
  FallbackDecision decision_;
  SessionSnapshots snapshots_;
};

// --- messages about a session to the journal, shards, workers and operators

// Returns the session's state except its snapshots.
SessionRecord MakeRecord(const CoordinatorSession& session);
// Announces the session's epoch, for each shard with layers.
EpochFence MakeFence(const CoordinatorSession& session);
// Returns one entry for each shard, in the coordinator's order. Entries without layers must not be sent.
std::vector<SessionInstall> MakeInstalls(const CoordinatorSession& session);
Directive MakeDirective(const CoordinatorSession& session);
CoordinatorSessionSummary MakeSummary(const CoordinatorSession& session);
// Returns the mode of the last step that all ranks have reported.
Mode LastMode(const CoordinatorSession& session);

}  // namespace precondor

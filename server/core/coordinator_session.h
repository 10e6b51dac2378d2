// SPDX-License-Identifier: Apache-2.0
// A session as the coordinator sees it: who holds each rank, which epoch it is, how far the leases reach and in which
// mode. State and rules alone; talking to shards and writing down is the Coordinator's part.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/coordinator.h"
#include "server/core/coordinator_journal.h"
#include "server/core/loss_table.h"
#include "server/core/shard_control.h"
#include "server/policy/fallback.h"

namespace precondor {

// Not thread-safe: the Coordinator's lock guards it, but for id and spec, which are const, and the placement, which
// changes under the SessionLock and the mutex together, so that either is enough to read it.
//
// Nothing that others rely on changes before it is durable: a change is planned (Plan..., BeginLeaseWrite), written
// down without the lock, and then adopted.
class CoordinatorSession {
 public:
  // `record.placement` has one entry a shard of the coordinator, in its order; those without layers are empty.
  CoordinatorSession(SessionRecord record, uint64_t lease_steps);

  // How a session begins: no rank has joined, the first lease is granted.
  static Membership FirstMembership(const SessionSpec& spec);
  static LeaseTerms FirstLease(const SessionSpec& spec, uint64_t lease_steps);

  uint64_t id() const { return id_; }
  const SessionSpec& spec() const { return spec_; }
  const std::vector<PlacedLayers>& placement() const { return placement_; }
  uint64_t epoch() const { return membership_.epoch; }
  uint32_t joined() const;
  bool active() const { return joined() == membership_.incarnations.size(); }

  // --- members ----------------------------------------------------------------------------------------------------
  // The membership once the rank's place is taken by a worker that begins at `first_step`; nullopt: it has it already.
  // A later holder begins a new epoch, with which the job goes back where it lacks factors that have been released.
  // Errors: InvalidArgument, NotFound UNKNOWN_RANK, FailedPrecondition STALE_INCARNATION.
  absl::StatusOr<std::optional<Membership>> PlanJoin(uint32_t rank, uint64_t incarnation, uint64_t first_step) const;
  // The membership once the rank is given back; its next holder begins a new epoch. nullopt: it is free already. Errors
  // as for PlanJoin.
  absl::StatusOr<std::optional<Membership>> PlanLeave(uint32_t rank, uint64_t incarnation) const;
  void Adopt(Membership next);
  // Other shards have the layers from the next epoch on.
  SessionRecord PlanMove(std::vector<PlacedLayers> placement) const;
  void AdoptMove(SessionRecord moved);
  // A move may or may not have been written down: what is written next says where the layers are.
  bool move_in_doubt() const { return move_in_doubt_; }
  void set_move_in_doubt(bool in_doubt) { move_in_doubt_ = in_doubt; }
  // The lease is to reach beyond this step.
  void WantStep(uint64_t step);

  // The shards keep no more what a new member goes on from: the job goes back to `step` with this epoch.
  Membership PlanGoBack(uint64_t step) const;
  EpochFence MakeFence() const;
  // What each shard is to be told, in the coordinator's order; one without layers is told nothing.
  std::vector<SessionInstall> MakeInstalls() const;
  bool shards_told() const { return shards_told_; }
  // They have been told of this membership; when it has changed since, the caller that changed it tells them again.
  // True when the job rolled back with it from first order to steps in second order: the shards may have released its
  // factors.
  bool NoteShardsTold(const Membership& told);
  const Membership& membership() const { return membership_; }

  // --- steps ------------------------------------------------------------------------------------------------------
  // Takes a report in; the step's loss when this report completed it. Errors: NotFound UNKNOWN_RANK,
  // FailedPrecondition STALE_EPOCH, STALE_INCARNATION, or STEP_TOO_FAR_AHEAD for a step that was never granted.
  absl::StatusOr<std::optional<LossTable::StepLoss>> Report(const StepReport& report, absl::Time now);
  // An operator's choice of the mode; nullopt gives it back to the policy.
  void Force(std::optional<Mode> mode);

  // A lease to write down: a longer lease, or a change of mode from the first step that no rank has been granted.
  // Until EndLeaseWrite no lease grows into what it changes. nullopt: nothing to write, or one is being written.
  std::optional<LeaseTerms> BeginLeaseWrite();
  void EndLeaseWrite(bool durable);

  // --- factors ----------------------------------------------------------------------------------------------------
  // Whether a step that some rank has yet to finish is in second order, or a probe of first order is under way.
  bool NeedsFactors() const;
  // What NeedsFactors says, with a version greater than any before, also before a restart.
  FactorHold MakeFactorHold(absl::Time now);
  // Steps in second order follow steps in first order that had none promised after them.
  bool ReturnsToSecondOrder(const LeaseTerms& next) const;
  // Instead of EndLeaseWrite: the shards cannot hold the factors. Tried again a lease's steps later.
  void StayInFirstOrder();

  // --- snapshots --------------------------------------------------------------------------------------------------
  // One more, as of the first step that no rank has been granted; no lease reaches it before EndSnapshotPlan.
  // FailedPrecondition: one is under way.
  absl::StatusOr<SessionSnapshot> PlanSnapshot();
  void EndSnapshotPlan();
  // The one that a session begins with, before any rank has joined. FailedPrecondition: a rank has joined.
  absl::StatusOr<SessionSnapshot> PlanRestore(uint64_t step) const;
  // Whether its factors are there. Unavailable: not all have been sent yet; FailedPrecondition: they never will be.
  absl::Status CheckRestored() const;
  void AdoptSnapshots(std::vector<SessionSnapshot> snapshots) { snapshots_ = std::move(snapshots); }
  const std::vector<SessionSnapshot>& snapshots() const { return snapshots_; }
  SnapshotOrder MakeSnapshotOrder(const SessionSnapshot& snapshot, bool again) const;
  // Why one that is under way cannot become whole any more; nullopt: it can.
  std::optional<std::string> WhyNoSnapshot(const SessionSnapshot& snapshot) const;
  // All ranks have come so far beyond the step that a shard which has not seen it never will.
  bool HasPassed(uint64_t step) const;
  // The policy wants one: the last is `interval_steps` old.
  bool WantsSnapshot(uint64_t interval_steps) const;

  Directive directive() const;
  const FallbackDecision& decision() const { return decision_; }
  Mode mode() const { return ModeAt(lease_.schedule, last_step_); }
  SessionRecord record() const;
  CoordinatorSessionSummary summary() const;

 private:
  // x + y, at most the greatest number.
  static uint64_t Plus(uint64_t x, uint64_t y) { return x + std::min(y, std::numeric_limits<uint64_t>::max() - x); }
  SessionSnapshot NextSnapshot(uint64_t step) const;
  absl::Status CheckHolder(uint32_t rank, uint64_t incarnation) const;
  std::vector<Member> Members() const;
  void Grant();
  std::vector<ModeInterval> WantedSchedule() const;

  // Const after construction.
  const uint64_t id_;
  const SessionSpec spec_;
  const uint64_t lease_steps_;

  std::vector<PlacedLayers> placement_;
  Membership membership_;
  bool shards_told_ = false;
  LeaseTerms lease_;                   // durable
  std::optional<LeaseTerms> pending_;  // being written down
  bool move_in_doubt_ = false;
  bool in_doubt_ = false;         // a change of mode may or may not have been written
  FallbackState fallback_;        // goes ahead of lease_.fallback
  FallbackDecision decision_;     // from fallback_
  uint64_t wanted_through_ = 0;   // that reports and joins ask for
  uint64_t granted_through_ = 0;  // to any rank, ever
  uint64_t last_step_ = 0;        // that all have reported in this epoch
  uint64_t open_from_ = 0;        // the lowest step not reported by all
  uint64_t stay_until_ = 0;       // no return to second order before all have reported the steps below
  bool rolled_back_ = false;      // to steps in second order, from first order, and not told to shards
  uint64_t factor_version_ = 0;
  std::vector<SessionSnapshot> snapshots_;    // durable, ascending
  std::optional<uint64_t> planned_snapshot_;  // as of this step, not announced
  double last_loss_ = 0;
  absl::Time last_finished_ = absl::InfinitePast();
  LossTable losses_;
};

}  // namespace precondor

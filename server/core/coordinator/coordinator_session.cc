// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/coordinator_session.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"
#include "server/policy/fallback.h"

namespace precondor {
namespace {

using absl::StatusCode;

// A process may begin so many steps after the lease of a session that is in use: with the checkpoint of another run.
constexpr uint64_t kMaxStepLead = uint64_t{1} << 24;

// Returns the last step that may have been granted. After a restart that is the end of the durable lease.
uint64_t GrantedThrough(const SessionRecord& record, const SessionMembers& members, uint64_t lease_steps) {
  return members.epoch() == 1 && members.joined() == 0 ? lease_steps : record.lease.durable_through;
}

}  // namespace

CoordinatorSession::CoordinatorSession(SessionRecord record, uint64_t lease_steps)
    : id(record.session_id),
      spec(std::move(record.spec)),
      access(std::move(record.access)),
      placement(std::move(record.placement)),
      members_(spec.name, std::move(record.membership)),
      leases_(record.lease, lease_steps, GrantedThrough(record, members_, lease_steps)),
      // Reports are not written down: the ranks of a session from the journal may have made any number.
      progress_(spec.world_size, lease_steps, members_.ever_active()),
      decision_(Decide(spec.fallback, record.lease.fallback)),
      snapshots_(spec.name) {}

// --- durable state --------------------------------------------------------------------------------------------------

absl::StatusOr<std::optional<Membership>> CoordinatorSession::PlanJoin(uint32_t rank, uint64_t incarnation,
                                                                       uint64_t first_step) const {
  PRECONDOR_ASSIGN_OR_RETURN(std::optional<Membership> next, members_.PlanJoin(rank, incarnation, first_step));
  if (!next.has_value()) return next;
  const uint64_t limit = StepSum(leases_.granted_through(), kMaxStepLead);
  if (members_.ever_active() && first_step > limit) {
    return ReasonedStatus(StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                          absl::StrCat("session \"", spec.name, "\" rank ", rank, ": first_step: expected at most ",
                                       limit, ", ", kMaxStepLead, " after the last step of the session's lease, got ",
                                       first_step, "; a job that begins there needs a new session"));
  }
  return next;
}

absl::StatusOr<SnapshotEntry> CoordinatorSession::PlanSnapshot() {
  const uint64_t step = leases_.first_open_step();
  PRECONDOR_ASSIGN_OR_RETURN(SnapshotEntry planned, snapshots_.Plan(step, members_.epoch(), placement));
  leases_.HoldBefore(step);
  return planned;
}

std::optional<LeaseTerms> CoordinatorSession::BeginLeaseWrite() {
  return leases_.BeginWrite(ApplyDecision(decision_, leases_.durable().schedule, leases_.first_open_step()),
                            decision_.state);
}

void CoordinatorSession::Adopt(CoordinatorRecord written) {
  if (auto* membership = std::get_if<MembershipRecord>(&written)) {
    AdoptMembership(std::move(membership->membership));
  } else if (auto* lease = std::get_if<LeaseRecord>(&written)) {
    leases_.Adopt(std::move(lease->lease));
  } else if (auto* snapshots = std::get_if<SnapshotsRecord>(&written)) {
    snapshots_.Adopt(std::move(snapshots->snapshots));
  }
}

void CoordinatorSession::NoteInDoubt(const CoordinatorRecord& record) {
  if (std::holds_alternative<LeaseRecord>(record)) leases_.NoteInDoubt();
}

void CoordinatorSession::AdoptMembership(Membership next) {
  const bool new_epoch = next.epoch != members_.epoch();
  members_.Adopt(std::move(next));
  if (new_epoch) progress_.BeginEpoch();
}

// --- steps ----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::optional<LossTable::StepLoss>> CoordinatorSession::Report(const StepReport& report,
                                                                              absl::Time now) {
  PRECONDOR_RETURN_IF_ERROR(members_.CheckMember(report.rank, report.incarnation, report.epoch));
  const auto rank_text = [&] { return absl::StrCat("session \"", spec.name, "\" rank ", report.rank, ": "); };
  if (report.step > leases_.granted_through()) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead,
                          absl::StrCat(rank_text(), "expected a step of the lease, at most ", leases_.granted_through(),
                                       ", got ", report.step));
  }
  if (report.samples > kMaxSamples) {
    return ReasonedStatus(
        StatusCode::kInvalidArgument, ErrorReason::kMalformed,
        absl::StrCat(rank_text(), "samples: expected at most ", kMaxSamples, ", got ", report.samples));
  }
  leases_.ExtendBeyond(report.step);
  const std::optional<FinishedStep> finished = progress_.Report(report, now);
  if (!finished.has_value()) return std::nullopt;
  const LossTable::StepLoss& loss = finished->loss;
  const FallbackState state = Advance(spec.fallback, decision_.state,
                                      {.step = loss.step,
                                       .loss = loss.loss,
                                       .learning_rate = loss.learning_rate,
                                       .seconds = finished->seconds,
                                       .mode = ModeAt(leases_.durable().schedule, loss.step),
                                       .skipped = loss.finite == 0});
  decision_ = Decide(spec.fallback, state);
  return loss;
}

void CoordinatorSession::Force(std::optional<Mode> mode) {
  decision_ = Decide(spec.fallback, precondor::Force(spec.fallback, decision_.state, mode));
}

void CoordinatorSession::WantFirstSteps() {
  if (!members_.active()) return;
  const std::vector<uint64_t>& steps = members_.membership().first_steps;
  leases_.ExtendBeyond(*std::min_element(steps.begin(), steps.end()));
}

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
          .decision = session.decision(),
          .modes = session.leases().durable().schedule,
          .snapshots = session.snapshots().list()};
}

}  // namespace precondor

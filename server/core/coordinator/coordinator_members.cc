// SPDX-License-Identifier: Apache-2.0
// Ranks that join and leave a session. Shards are told of a membership in two steps: earlier epochs are ended on all of
// them, then the new one is installed.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_errors.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_lock.h"
#include "server/core/coordinator/session_messages.h"

namespace precondor {

absl::StatusOr<JoinResult> Coordinator::JoinSession(absl::string_view name, uint32_t rank, uint64_t incarnation,
                                                    uint64_t first_step, const SessionCaller& caller) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  SessionLock locked(*this, name, /*create=*/false);
  if (locked.state() == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  CoordinatorSession& session = *locked.state();
  if (!session.access().Admits(caller)) return NotTheirs(absl::StrCat("\"", name, "\""));
  std::optional<Membership> next;
  {
    MutexLock lock(mu_);
    PRECONDOR_RETURN_IF_ERROR(session.snapshots().CheckRestored());
    PRECONDOR_ASSIGN_OR_RETURN(next, session.PlanJoin(rank, incarnation, first_step));
  }
  if (next.has_value()) {
    PRECONDOR_RETURN_IF_ERROR(WriteMembership(session, *next));
    logger_.Log(Severity::kInfo, "rank joined",
                {{"session", name},
                 {"rank", rank},
                 {"incarnation", incarnation},
                 {"first_step", first_step},
                 {"epoch", next->epoch}});
  }
  {
    MutexLock lock(mu_);
    session.WantFirstSteps();
  }
  WriteLease(session);
  PRECONDOR_RETURN_IF_ERROR(TellShards(session));
  MutexLock lock(mu_);
  CoordinatorSessionSummary summary = MakeSummary(session);
  return JoinResult{.session_id = session.id(),
                    .epoch = session.members().epoch(),
                    .active = session.members().active(),
                    .missing_ranks = session.members().Missing(),
                    .shard_map = std::move(summary.shard_map),
                    .directive = MakeDirective(session),
                    .spec = session.spec(),
                    .secret = session.access().secret};
}

absl::Status Coordinator::TellShards(CoordinatorSession& session) {
  {
    MutexLock lock(mu_);
    if (session.members().shards_told()) return absl::OkStatus();
  }
  // After an error the shards stay untold; the next join or Reconcile tells them.
  PRECONDOR_RETURN_IF_ERROR(FenceEpoch(session));
  std::vector<SessionInstall> installs;
  Membership told;
  uint32_t joined = 0;
  bool factors_first = false;
  {
    MutexLock lock(mu_);
    factors_first = WorkersPrecondition(session.spec()) && session.members().epoch() > 1 && session.NeedsFactors();
    installs = MakeInstalls(session);
    told = session.members().membership();
    joined = session.members().joined();
  }
  // Before a rank can fetch factors: a rank that is told that there are none would continue with other factors than one
  // that asks later.
  if (factors_first) PRECONDOR_RETURN_IF_ERROR(HoldFactors(session));
  PRECONDOR_RETURN_IF_ERROR(InstallOnShards(installs));
  observer_.OnEpoch(session.spec().name, told.epoch, joined, session.spec().world_size);
  bool factors_again = false;
  {
    MutexLock lock(mu_);
    factors_again = session.NoteShardsTold(told);
  }
  // Without factors, the steps that the job repeats would be answered IDENTITY.
  if (factors_again && !factors_first) HoldFactors(session).IgnoreError();
  return absl::OkStatus();
}

absl::Status Coordinator::FenceEpoch(CoordinatorSession& session) {
  EpochFence fence;
  {
    MutexLock lock(mu_);
    fence = MakeFence(session);
    const bool decided = session.members().membership().rollback_epoch == fence.epoch;
    if (fence.epoch == 1 || decided) return absl::OkStatus();
  }
  std::optional<uint64_t> back_to;
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (session.placement().shards()[s].layers.empty()) continue;
    const absl::StatusOr<std::optional<uint64_t>> gone = shards_[s].control->Fence(fence);
    if (GetErrorReason(gone.status()) == ErrorReason::kUnknownSession) continue;  // it has lost the session
    if (!gone.ok()) {
      return AddContext(gone.status(),
                        absl::StrCat("session \"", session.spec().name, "\", shard ", shards_[s].address));
    }
    if (gone->has_value()) back_to = std::min(back_to.value_or(**gone), **gone);
  }
  if (!back_to.has_value()) return absl::OkStatus();
  Membership next;
  {
    MutexLock lock(mu_);
    next = SessionMembers::RolledBack(session.members().membership(), *back_to);
  }
  PRECONDOR_RETURN_IF_ERROR(WriteMembership(session, next));
  logger_.Log(
      Severity::kWarning, "job goes back",
      {{"session", session.spec().name}, {"epoch", next.epoch}, {"step", *back_to}, {"reason", "a rank began there"}});
  return absl::OkStatus();
}

absl::Status Coordinator::LeaveSession(uint64_t session_id, uint32_t rank, uint64_t incarnation,
                                       const SessionCaller& caller) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  const std::shared_ptr<CoordinatorSession> found = Find(session_id);
  if (found == nullptr) return NoSession(session_id);
  if (!found->access().IsShownBy(caller)) return NotTheirs(session_id);
  SessionLock locked(*this, found->spec().name, /*create=*/false);
  if (locked.state() != found) return NoSession(session_id);
  CoordinatorSession& session = *found;
  std::optional<Membership> next;
  {
    MutexLock lock(mu_);
    PRECONDOR_ASSIGN_OR_RETURN(next, session.members().PlanLeave(rank, incarnation));
  }
  if (!next.has_value()) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(WriteMembership(session, *next));
  uint32_t joined = 0;
  {
    MutexLock lock(mu_);
    joined = session.members().joined();
  }
  observer_.OnEpoch(session.spec().name, next->epoch, joined, session.spec().world_size);
  logger_.Log(Severity::kInfo, "rank left",
              {{"session", session.spec().name}, {"rank", rank}, {"incarnation", incarnation}});
  return absl::OkStatus();
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Ranks that join and leave a session. Shards are told of a membership in two steps: earlier epochs are ended on all of
// them, then the new one is installed.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_context.h"
#include "server/core/coordinator/coordinator_session.h"

namespace precondor {
namespace {

absl::Status WriteMembership(CoordinatorContext& c, CoordinatorSession& session, const Membership& next) {
  return c.Write(session, MembershipRecord{.session_id = session.id, .membership = next});
}

// Ends earlier epochs on the shards. If a shard no longer keeps a step that a new member needs, rolls the job back to
// it.
absl::Status FenceEpoch(CoordinatorContext& c, CoordinatorSession& session) {
  EpochFence fence;
  Membership next;
  {
    MutexLock lock(c.mu);
    fence = MakeFence(session);
    next = session.members().membership();
  }
  const bool decided = next.rollback_epoch == fence.epoch;
  if (fence.epoch == 1 || decided) return absl::OkStatus();
  std::optional<uint64_t> back_to;
  for (size_t s = 0; s < c.shards.size(); ++s) {
    if (session.placement[s].layers.empty()) continue;
    const absl::StatusOr<std::optional<uint64_t>> gone = c.shards[s].control->Fence(fence);
    if (GetErrorReason(gone.status()) == ErrorReason::kUnknownSession) continue;  // it has lost the session
    if (!gone.ok()) {
      return AddContext(gone.status(),
                        absl::StrCat("session \"", session.spec.name, "\", shard ", c.shards[s].address));
    }
    if (gone->has_value()) back_to = std::min(back_to.value_or(**gone), **gone);
  }
  if (!back_to.has_value()) return absl::OkStatus();
  next = SessionMembers::RolledBack(std::move(next), *back_to);
  PRECONDOR_RETURN_IF_ERROR(WriteMembership(c, session, next));
  c.logger.Log(
      Severity::kWarning, "job goes back",
      {{"session", session.spec.name}, {"epoch", next.epoch}, {"step", *back_to}, {"reason", "a rank began there"}});
  return absl::OkStatus();
}

}  // namespace

absl::Status TellShards(CoordinatorContext& c, CoordinatorSession& session) {
  {
    MutexLock lock(c.mu);
    if (session.members().shards_told()) return absl::OkStatus();
  }
  // After an error the shards stay untold; the next join or Reconcile tells them.
  PRECONDOR_RETURN_IF_ERROR(FenceEpoch(c, session));
  std::vector<SessionInstall> installs;
  Membership told;
  uint32_t joined = 0;
  {
    MutexLock lock(c.mu);
    installs = MakeInstalls(session);
    told = session.members().membership();
    joined = session.members().joined();
  }
  PRECONDOR_RETURN_IF_ERROR(InstallOnShards(c, installs));
  c.observer.OnEpoch(session.spec.name, told.epoch, joined, session.spec.world_size);
  MutexLock lock(c.mu);
  session.NoteShardsTold(told);
  return absl::OkStatus();
}

absl::StatusOr<JoinResult> Coordinator::JoinSession(absl::string_view name, uint32_t rank, uint64_t incarnation,
                                                    uint64_t first_step, const SessionCaller& caller) {
  CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  const SessionLock locked(c, name);
  if (locked.session() == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  CoordinatorSession& session = *locked.session();
  if (!session.access.Admits(caller)) return NotTheirs(absl::StrCat("\"", name, "\""));
  std::optional<Membership> next;
  {
    MutexLock lock(c.mu);
    PRECONDOR_RETURN_IF_ERROR(session.snapshots().CheckRestored());
    PRECONDOR_ASSIGN_OR_RETURN(next, session.PlanJoin(rank, incarnation, first_step));
  }
  if (next.has_value()) {
    PRECONDOR_RETURN_IF_ERROR(WriteMembership(c, session, *next));
    c.logger.Log(Severity::kInfo, "rank joined",
                 {{"session", name},
                  {"rank", rank},
                  {"incarnation", incarnation},
                  {"first_step", first_step},
                  {"epoch", next->epoch}});
  }
  {
    MutexLock lock(c.mu);
    session.WantFirstSteps();
  }
  WriteLease(c, session);
  PRECONDOR_RETURN_IF_ERROR(TellShards(c, session));
  MutexLock lock(c.mu);
  return JoinResult{.session_id = session.id,
                    .epoch = session.members().epoch(),
                    .active = session.members().active(),
                    .missing_ranks = session.members().Missing(),
                    .shard_map = MakeSummary(session).shard_map,
                    .directive = MakeDirective(session),
                    .spec = session.spec,
                    .secret = session.access.secret};
}

absl::Status Coordinator::LeaveSession(uint64_t session_id, uint32_t rank, uint64_t incarnation,
                                       const SessionCaller& caller) {
  CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  const std::shared_ptr<CoordinatorSession> found = c.Find(session_id);
  if (found == nullptr) return NoSession(session_id);
  CoordinatorSession& session = *found;
  if (!session.access.IsShownBy(caller)) return NotTheirs(session_id);
  const SessionLock locked(c, session.spec.name);
  if (locked.session() != found) return NoSession(session_id);
  std::optional<Membership> next;
  {
    MutexLock lock(c.mu);
    PRECONDOR_ASSIGN_OR_RETURN(next, session.members().PlanLeave(rank, incarnation));
  }
  if (!next.has_value()) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(WriteMembership(c, session, *next));
  uint32_t joined = 0;
  {
    MutexLock lock(c.mu);
    joined = session.members().joined();
  }
  c.observer.OnEpoch(session.spec.name, next->epoch, joined, session.spec.world_size);
  c.logger.Log(Severity::kInfo, "rank left",
               {{"session", session.spec.name}, {"rank", rank}, {"incarnation", incarnation}});
  return absl::OkStatus();
}

}  // namespace precondor

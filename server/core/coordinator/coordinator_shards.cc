// SPDX-License-Identifier: Apache-2.0
// Calls to shards, and the periodic repair: probes each shard, and carries out what reconcile.h finds.
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_context.h"
#include "server/core/coordinator/coordinator_session.h"

namespace precondor {
namespace {

// Returns the shard's description, and records whether it answered.
absl::StatusOr<ShardDescription> Probe(CoordinatorContext& c, size_t shard) {
  const absl::Time sent = c.clock.Now();
  absl::StatusOr<ShardDescription> description = c.shards[shard].control->Probe();
  MutexLock lock(c.mu);
  const bool answers = description.ok();
  if (!(answers ? c.watch.NoteAnswer(shard, c.clock.Now()) : c.watch.NoteSilence(shard, sent))) return description;
  const std::string& address = c.shards[shard].address;
  if (answers) {
    c.logger.Log(Severity::kInfo, "shard answers again", {{"shard", address}});
  } else {
    c.logger.Log(
        Severity::kWarning, "shard does not answer",
        {{"shard", address}, {"probes", ShardWatch::kLeastProbes}, {"reason", description.status().message()}});
  }
  c.observer.OnUnreachableShards(c.watch.unreachable());
  return description;
}

absl::Status ClearFromShard(CoordinatorContext& c, const CoordinatorAction& action) {
  const uint64_t id = action.session_id;
  const ShardEndpoint& shard = c.shards[action.shard];
  const bool abandoned = action.kind == ActionKind::kRemoveAbandoned;
  absl::Status cleared = abandoned ? shard.control->Remove(id).status() : shard.control->Quarantine(id).status();
  c.logger.Log(
      Severity::kWarning,
      !cleared.ok() ? "cannot remove an orphaned session yet"
      : abandoned   ? "session that is not open removed"
                    : "orphaned session quarantined",
      {{"session", action.name},
       {"session_id", id},
       {"shard", shard.address},
       {"reserved_bytes", action.reserved_bytes},
       {"reason", !cleared.ok() ? absl::string_view(cleared.message())
                  : abandoned
                      ? "it was installed too late"
                      : "this coordinator does not know it; the shard keeps its files (docs/operate/runbooks.md)"}});
  return cleared;
}

// Installs the session on one shard again, or on all its shards if these may not know its members.
absl::Status Reinstall(CoordinatorContext& c, CoordinatorSession& session, size_t shard) {
  SessionInstall install;
  bool told = false;
  {
    MutexLock lock(c.mu);
    install = MakeInstalls(session)[shard];
    told = session.members().shards_told();
  }
  absl::Status status = told ? c.shards[shard].control->Install(install).status() : TellShards(c, session);
  if (absl::IsDataLoss(status)) FailRestore(c, session, status);
  const absl::string_view reason = !status.ok() ? absl::string_view(status.message())
                                   : told       ? "the shard lacked it"
                                                : "it is not known whether the shard has its members";
  c.logger.Log(status.ok() ? Severity::kInfo : Severity::kWarning,
               status.ok() ? "session installed again" : "session cannot be installed again",
               {{"session", session.spec.name},
                {"session_id", install.session_id},
                {"epoch", install.epoch},
                {"shard", c.shards[shard].address},
                {"reason", reason}});
  return status;
}

// An action for one session, which may have been closed since.
absl::Status CarryOutForSession(CoordinatorContext& c, const CoordinatorAction& action) {
  const SessionLock locked(c, action.name);
  if (locked.session() == nullptr || locked.session()->id != action.session_id) return absl::OkStatus();
  CoordinatorSession& session = *locked.session();
  if (action.kind == ActionKind::kInstall) return Reinstall(c, session, action.shard);
  if (action.kind == ActionKind::kBeginSnapshot) return BeginSnapshot(c, session).status();
  AdvanceSnapshot(c, session);
  return absl::OkStatus();
}

}  // namespace

absl::Status InstallOnShards(const CoordinatorContext& c, const std::vector<SessionInstall>& installs) {
  for (size_t s = 0; s < installs.size(); ++s) {
    if (installs[s].layers.empty()) continue;
    const absl::Status status = c.shards[s].control->Install(installs[s]).status();
    if (!status.ok()) {
      return AddContext(status, absl::StrCat("session \"", installs[s].spec.name, "\", shard ", c.shards[s].address));
    }
  }
  return absl::OkStatus();
}

absl::Status RemoveEnding(CoordinatorContext& c, uint64_t session_id, size_t shard) {
  {
    MutexLock lock(c.mu);
    if (!c.state.MustRemove(session_id, shard)) return absl::OkStatus();
  }
  const absl::Status removed = c.shards[shard].control->Remove(session_id).status();
  PRECONDOR_RETURN_IF_ERROR(
      AddContext(removed, absl::StrCat("session_id ", session_id, " ends, shard ", c.shards[shard].address)));
  MutexLock lock(c.mu);
  const auto ends = c.state.ending.find(session_id);
  if (ends != c.state.ending.end()) ends->second.removed[shard] = true;
  return absl::OkStatus();
}

void WriteClose(CoordinatorContext& c, uint64_t session_id) {
  const auto adopt = [&] {
    MutexLock lock(c.mu);
    c.state.Abandon(session_id);
  };
  // If the write fails, the next Reconcile repeats it.
  c.journal.Write(CloseRecord{.session_id = session_id}, adopt).IgnoreError();
}

absl::Status CarryOut(CoordinatorContext& c, const CoordinatorAction& action) {
  switch (action.kind) {
    case ActionKind::kRemoveEnding: {
      absl::Status removed = RemoveEnding(c, action.session_id, action.shard);
      if (!removed.ok()) {
        c.logger.Log(Severity::kWarning, "cannot remove an ended session yet",
                     {{"reason", absl::string_view(removed.message())}});
      }
      return removed;
    }
    case ActionKind::kRemoveAbandoned:
    case ActionKind::kQuarantine:
      return ClearFromShard(c, action);
    case ActionKind::kClose:
      WriteClose(c, action.session_id);
      return absl::OkStatus();
    case ActionKind::kInstall:
    case ActionKind::kBeginSnapshot:
    case ActionKind::kAskForParts:
      return CarryOutForSession(c, action);
  }
  return absl::OkStatus();
}

void Coordinator::ProbeShard(size_t shard) {
  if (context_->CheckLeads().ok()) Probe(*context_, shard).IgnoreError();  // Probe has recorded an error
}

void Coordinator::Reconcile() {
  CoordinatorContext& c = *context_;
  if (!c.CheckLeads().ok()) return;
  std::vector<CoordinatorAction> actions;
  // The next Reconcile finds again what fails.
  const auto carry_out = [&] {
    for (const CoordinatorAction& action : actions) CarryOut(c, action).IgnoreError();
  };
  for (size_t s = 0; s < c.shards.size(); ++s) {
    const absl::StatusOr<ShardDescription> observed = Probe(c, s);
    if (!observed.ok()) continue;
    {
      MutexLock lock(c.mu);
      Observe(c.state, s, *observed);
      actions = ReconcileShard(c.state, s, *observed);
    }
    carry_out();
  }
  {
    MutexLock lock(c.mu);
    actions = ReconcileSessions(c.state, c.options.snapshot_interval_steps);
  }
  carry_out();
}

}  // namespace precondor

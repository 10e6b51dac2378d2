// SPDX-License-Identifier: Apache-2.0
// Periodically compares what shards hold with what the coordinator knows, and repairs the differences.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_lock.h"
#include "server/core/coordinator/session_messages.h"

namespace precondor {

bool Coordinator::ClearOrphans(const ShardEndpoint& shard, const ShardDescription& description) {
  bool any = false;
  for (const HeldSession& held : description.sessions) {
    const uint64_t id = held.session_id;
    bool abandoned = false;
    {
      MutexLock lock(mu_);
      if (sessions_.Find(id) != nullptr || opening_.contains(id) || ending_.contains(id)) continue;
      abandoned = ids_.IsAbandoned(id);
    }
    const absl::Status cleared =
        abandoned ? shard.control->Remove(id).status() : shard.control->Quarantine(id).status();
    any = any || cleared.ok();
    logger_.Log(
        Severity::kWarning,
        !cleared.ok() ? "cannot remove an orphaned session yet"
        : abandoned   ? "session that is not open removed"
                      : "orphaned session quarantined",
        {{"session", held.name},
         {"session_id", id},
         {"shard", shard.address},
         {"reserved_bytes", held.reserved_bytes},
         {"reason", !cleared.ok() ? absl::string_view(cleared.message())
                    : abandoned
                        ? "it was installed too late"
                        : "this coordinator does not know it; the shard keeps its files (docs/operate/runbooks.md)"}});
  }
  return any;
}

absl::Status Coordinator::RemoveEnding(uint64_t session_id, size_t shard) {
  {
    MutexLock lock(mu_);
    if (!ending_.MustRemove(session_id, shard)) return absl::OkStatus();
  }
  if (absl::Status removed = shards_[shard].control->Remove(session_id).status(); !removed.ok()) {
    return ReasonedStatus(
        removed.code(), GetErrorReason(removed),
        absl::StrCat("session_id ", session_id, " ends, shard ", shards_[shard].address, ": ", removed.message()));
  }
  MutexLock lock(mu_);
  ending_.NoteRemoved(session_id, shard, true);
  return absl::OkStatus();
}

void Coordinator::RemoveEnding(size_t shard, const ShardDescription& description) {
  std::vector<uint64_t> ids;
  {
    MutexLock lock(mu_);
    for (const HeldSession& held : description.sessions) {
      // A delayed Install may have installed the session again.
      ending_.NoteRemoved(held.session_id, shard, false);
    }
    ids = ending_.Ids();
  }
  for (const uint64_t id : ids) {
    const absl::Status removed = RemoveEnding(id, shard);
    if (removed.ok()) continue;
    logger_.Log(Severity::kWarning, "cannot remove an ended session yet",
                {{"reason", absl::string_view(removed.message())}});
  }
}

void Coordinator::CloseRemoved() {
  std::vector<uint64_t> removed;
  {
    MutexLock lock(mu_);
    removed = ending_.RemovedEverywhere();
  }
  for (const uint64_t id : removed) {
    // If the write fails, the next Reconcile repeats it.
    const auto close = [id] { return CloseRecord{.session_id = id}; };
    const auto adopt = [&] {
      MutexLock lock(mu_);
      ending_.Erase(id);
      ids_.Abandon(id);
    };
    journal_.Write(close, adopt).IgnoreError();
  }
}

absl::StatusOr<ShardDescription> Coordinator::Probe(size_t shard) {
  const absl::Time sent = clock_.Now();
  absl::StatusOr<ShardDescription> description = shards_[shard].control->Probe();
  const bool changed = description.ok() ? watch_.NoteAnswer(shard, clock_.Now()) : watch_.NoteSilence(shard, sent);
  if (changed) ReportReachability(shard, description.status());
  return description;
}

void Coordinator::ReportReachability(size_t shard, const absl::Status& probe) {
  if (probe.ok()) {
    logger_.Log(Severity::kInfo, "shard answers again", {{"shard", shards_[shard].address}});
  } else {
    logger_.Log(Severity::kWarning, "shard does not answer",
                {{"shard", shards_[shard].address}, {"probes", ShardWatch::kLeastProbes}, {"reason", probe.message()}});
  }
  MutexLock lock(mu_);  // so that the count that is reported last is the latest
  observer_.OnUnreachableShards(watch_.unreachable());
}

void Coordinator::ProbeShard(size_t shard) {
  if (CheckLeads().ok()) Probe(shard).IgnoreError();  // Probe has recorded an error
}

void Coordinator::Reconcile() {
  if (!CheckLeads().ok()) return;
  for (size_t s = 0; s < shards_.size(); ++s) {
    absl::StatusOr<ShardDescription> description = Probe(s);
    if (!description.ok()) continue;  // the next Reconcile asks the shard again
    RemoveEnding(s, *description);
    ClearOrphans(shards_[s], *description);
    ReconcileFactors(s, *description);
    std::vector<std::string> lacking;
    {
      MutexLock lock(mu_);
      for (const auto& [id, session] : sessions_.by_id()) {
        // A session without the factors that it was to begin with stays lost: no rank may train on fresh ones instead.
        if (session->placement().shards()[s].layers.empty() || session->snapshots().RestoreFailed()) continue;
        const auto held = std::find_if(description->sessions.begin(), description->sessions.end(),
                                       [id = id](const HeldSession& one) { return one.session_id == id; });
        // A shard whose disk has refused log records may have forgotten members in a restart.
        const bool current = held != description->sessions.end() && held->epoch == session->members().epoch() &&
                             held->joined >= session->members().joined();
        if (current) session->NoteShardStep(s, held->last_step);
        if (!current || !session->members().shards_told()) lacking.push_back(session->spec().name);
      }
    }
    for (const std::string& name : lacking) Reinstall(name, s);
  }
  CloseRemoved();
  CompleteSnapshots();
}

void Coordinator::Reinstall(const std::string& name, size_t shard) {
  SessionLock locked(*this, name, /*create=*/false);
  if (locked.state() == nullptr || locked.state()->placement().shards()[shard].layers.empty()) return;
  SessionInstall install;
  bool told = false;
  {
    MutexLock lock(mu_);
    install = MakeInstalls(*locked.state())[shard];
    told = locked.state()->members().shards_told();
  }
  const absl::Status status = told ? shards_[shard].control->Install(install).status() : TellShards(*locked.state());
  if (absl::IsDataLoss(status)) FailRestore(*locked.state(), status);
  const absl::string_view reason = !status.ok() ? absl::string_view(status.message())
                                   : told       ? "the shard lacked it"
                                                : "it is not known whether the shard has its members";
  logger_.Log(status.ok() ? Severity::kInfo : Severity::kWarning, "session installed again",
              {{"session", name},
               {"session_id", install.session_id},
               {"epoch", install.epoch},
               {"shard", shards_[shard].address},
               {"reason", reason}});
}

}  // namespace precondor

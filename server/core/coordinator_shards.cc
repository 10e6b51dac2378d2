// SPDX-License-Identifier: Apache-2.0
// What shards hold, as against what the coordinator knows: looked after every now and then.
#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/core/coordinator.h"
#include "server/core/coordinator_session.h"
#include "server/core/session_lock.h"

namespace precondor {
namespace {

constexpr size_t kAbandoned = 1000;  // ids; an Install that comes later than so many sessions is put in quarantine

}  // namespace

bool Coordinator::ClearOrphans(const ShardEndpoint& shard, const ShardDescription& description) {
  bool any = false;
  for (const HeldSession& held : description.sessions) {
    const uint64_t id = held.session_id;
    bool abandoned = false;
    {
      MutexLock lock(mu_);
      if (by_id_.contains(id) || opening_.contains(id) || ending_.contains(id)) continue;
      abandoned = abandoned_.contains(id);
    }
    const absl::Status cleared =
        abandoned ? shard.control->Remove(id).status() : shard.control->Quarantine(id).status();
    any = any || cleared.ok();
    logger_.Log(Severity::kWarning,
                !cleared.ok() ? "orphaned session stays"
                : abandoned   ? "session that is not open removed"
                              : "orphaned session quarantined",
                {{"session", held.name},
                 {"session_id", id},
                 {"shard", shard.address},
                 {"reserved_bytes", held.reserved_bytes},
                 {"reason", !cleared.ok() ? absl::string_view(cleared.message())
                            : abandoned   ? "it was installed too late"
                                        : "this coordinator does not know it; see precondorctl session quarantined"}});
  }
  return any;
}

void Coordinator::RemoveLeftovers(size_t shard, const ShardDescription& description) {
  for (const HeldSession& held : description.sessions) {
    const std::shared_ptr<CoordinatorSession> session = Find(held.session_id);
    if (session == nullptr) continue;
    // Under the session's lock, so that no layers come to the shard meanwhile.
    SessionLock locked(*this, session->spec().name, /*create=*/false);
    if (locked.state() != session || !session->placement()[shard].layers.empty()) continue;
    const absl::Status removed = shards_[shard].control->Remove(held.session_id).status();
    logger_.Log(removed.ok() ? Severity::kInfo : Severity::kWarning,
                removed.ok() ? "moved session removed" : "moved session stays",
                {{"session", held.name},
                 {"session_id", held.session_id},
                 {"shard", shards_[shard].address},
                 {"reserved_bytes", held.reserved_bytes},
                 {"reason", removed.ok() ? "its layers are on other shards" : absl::string_view(removed.message())}});
  }
}

absl::Status Coordinator::RemoveEnding(uint64_t session_id, size_t shard) {
  {
    MutexLock lock(mu_);
    const auto found = ending_.find(session_id);
    if (found == ending_.end() || found->second.removed[shard]) return absl::OkStatus();
  }
  if (absl::Status removed = shards_[shard].control->Remove(session_id).status(); !removed.ok()) {
    return ReasonedStatus(
        removed.code(), GetErrorReason(removed),
        absl::StrCat("session_id ", session_id, " ends, shard ", shards_[shard].address, ": ", removed.message()));
  }
  MutexLock lock(mu_);
  const auto found = ending_.find(session_id);
  if (found != ending_.end()) found->second.removed[shard] = true;
  return absl::OkStatus();
}

void Coordinator::RemoveEnding(size_t shard, const ShardDescription& description) {
  std::vector<uint64_t> ids;
  {
    MutexLock lock(mu_);
    for (const HeldSession& held : description.sessions) {
      // Perhaps again: an Install was on its way.
      if (const auto found = ending_.find(held.session_id); found != ending_.end())
        found->second.removed[shard] = false;
    }
    for (const auto& [id, ending] : ending_) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    const absl::Status removed = RemoveEnding(id, shard);
    if (removed.ok()) continue;
    logger_.Log(Severity::kWarning, "session that ends stays", {{"reason", absl::string_view(removed.message())}});
  }
}

void Coordinator::CloseRemoved() {
  std::vector<uint64_t> removed;
  {
    MutexLock lock(mu_);
    for (const auto& [id, ending] : ending_) {
      if (absl::c_linear_search(ending.removed, false)) continue;
      removed.push_back(id);
    }
  }
  for (const uint64_t id : removed) {
    // What is not written is found again the next time.
    WriteDown(CloseRecord{.session_id = id}, [&] {
      MutexLock lock(mu_);
      ending_.erase(id);
      Abandon(id);
    }).IgnoreError();
  }
}

void Coordinator::Abandon(uint64_t id) {
  abandoned_.insert(id);
  if (abandoned_.size() > kAbandoned) abandoned_.erase(abandoned_.begin());
}

absl::StatusOr<ShardDescription> Coordinator::Probe(size_t shard) {
  ShardLease lease{.from = absl::InfinitePast(), .duration = options_.shard_loss_timeout / 2};
  const absl::Time sent = clock_.Now();
  {
    MutexLock lock(mu_);
    lease.from = seen_[shard].shard_time;
  }
  absl::StatusOr<ShardDescription> description = shards_[shard].control->Probe(lease);
  bool changed = false;
  {
    MutexLock lock(mu_);
    Seen& seen = seen_[shard];
    seen.silent = !description.ok();
    if (description.ok()) {
      changed = seen.unanswered >= kLeastProbes;
      seen.answered = clock_.Now();
      seen.unanswered = 0;
      seen.shard_time = description->shard_time;
    } else if (sent >= seen.answered && sent - seen.counted >= options_.probe_interval) {
      changed = ++seen.unanswered == kLeastProbes;
      seen.counted = sent;
    }
  }
  if (changed) ReportReachability(shard, description.status());
  return description;
}

void Coordinator::ReportReachability(size_t shard, const absl::Status& probe) {
  if (probe.ok()) {
    logger_.Log(Severity::kInfo, "shard answers again", {{"shard", shards_[shard].address}});
  } else {
    logger_.Log(Severity::kWarning, "shard does not answer",
                {{"shard", shards_[shard].address}, {"probes", kLeastProbes}, {"reason", probe.message()}});
  }
  MutexLock lock(mu_);
  observer_.OnUnreachableShards(
      absl::c_count_if(seen_, [](const Seen& seen) { return seen.unanswered >= kLeastProbes; }));
}

void Coordinator::ProbeShard(size_t shard) {
  if (CheckLeads().ok()) Probe(shard).IgnoreError();  // its silence is noted
}

absl::Status Coordinator::CheckAnswers(const SessionSpec& spec, size_t shard) const {
  MutexLock lock(mu_);
  if (spec.on_shard_loss != ShardLossPolicy::kDegrade || !seen_[shard].silent) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("session \"", spec.name, "\", shard ", shards_[shard].address, ": it does not answer"));
}

void Coordinator::Reconcile() {
  if (!CheckLeads().ok()) return;
  std::vector<std::optional<ShardDescription>> descriptions(shards_.size());
  for (size_t s = 0; s < shards_.size(); ++s) {
    absl::StatusOr<ShardDescription> description = Probe(s);
    if (!description.ok()) continue;  // it is down, and asked again
    RemoveEnding(s, *description);
    ClearOrphans(shards_[s], *description);
    RemoveLeftovers(s, *description);
    ReconcileFactors(s, *description);
    std::vector<std::string> lacking;
    {
      MutexLock lock(mu_);
      for (const auto& [id, session] : by_id_) {
        if (session->placement()[s].layers.empty()) continue;
        const auto held = std::find_if(description->sessions.begin(), description->sessions.end(),
                                       [id = id](const HeldSession& one) { return one.session_id == id; });
        // One that comes back from a log that its disk would not take may have forgotten who joined.
        const bool current =
            held != description->sessions.end() && held->epoch == session->epoch() && held->joined >= session->joined();
        if (!current || !session->shards_told()) lacking.push_back(session->spec().name);
      }
    }
    for (const std::string& name : lacking) Reinstall(name, s);
    descriptions[s] = *std::move(description);
  }
  CloseRemoved();
  ReplaceLostShards(descriptions);
  CompleteSnapshots();
}

void Coordinator::Reinstall(const std::string& name, size_t shard) {
  SessionLock locked(*this, name, /*create=*/false);
  if (locked.state() == nullptr || locked.state()->placement()[shard].layers.empty()) return;
  SessionInstall install;
  bool told = false;
  {
    MutexLock lock(mu_);
    install = locked.state()->MakeInstalls()[shard];
    told = locked.state()->shards_told();
  }
  const absl::Status status = told ? shards_[shard].control->Install(install).status() : TellShards(*locked.state());
  logger_.Log(status.ok() ? Severity::kInfo : Severity::kWarning, "session installed again",
              {{"session", name},
               {"session_id", install.session_id},
               {"epoch", install.epoch},
               {"shard", shards_[shard].address},
               {"reason", status.ok() ? "the shard lacked it" : absl::string_view(status.message())}});
}

}  // namespace precondor

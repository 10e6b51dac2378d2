// SPDX-License-Identifier: Apache-2.0
// Sessions that shards keep and the coordinator's journal does not have: lists, adopts and deletes them for an
// operator.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_lock.h"
#include "server/core/coordinator/session_messages.h"

namespace precondor {
namespace {

// Adds one shard's part of a session to the parts of the shards before it.
void AddPart(const QuarantinedSession& found, size_t shard, QuarantineSummary& summary, std::vector<uint64_t>& epochs) {
  const SessionInstall& install = found.install;
  summary.last_step = std::max(summary.last_step, found.last_step);
  summary.since = std::max(summary.since, found.since);
  if (install.epoch > summary.install.epoch) summary.install = install;
  epochs[shard] = install.epoch;
  std::vector<uint32_t>& layers = summary.placement[shard].layers;
  layers = install.layers;
  for (size_t other = 0; other < shard; ++other) {
    std::vector<uint32_t>& theirs = summary.placement[other].layers;
    std::vector<uint32_t>& loses = epochs[other] >= install.epoch ? layers : theirs;
    const std::vector<uint32_t> keeps = epochs[other] >= install.epoch ? theirs : layers;
    std::erase_if(loses, [&](uint32_t layer) { return absl::c_linear_search(keeps, layer); });
  }
}

// Returns the membership of the next epoch: no members, but the last holders, so that no worker continues without
// joining.
Membership NextMembership(const SessionInstall& install) {
  Membership next = SessionMembers::First(install.spec);
  next.epoch = install.epoch + 1;
  next.rollback_epoch = install.rollback_epoch;
  next.resume_step = install.rollback_step;
  for (const Member& member : install.members) {
    next.first_steps[member.rank] = member.first_step;
    next.last_holders[member.rank] = member.incarnation;
  }
  return next;
}

}  // namespace

absl::StatusOr<std::vector<QuarantineSummary>> Coordinator::ListQuarantined() const {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  std::map<uint64_t, QuarantineSummary> found;
  std::map<uint64_t, std::vector<uint64_t>> epochs;
  for (size_t s = 0; s < shards_.size(); ++s) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<QuarantinedSession> listed, shards_[s].control->ListQuarantined());
    for (const QuarantinedSession& session : listed) {
      const uint64_t id = session.install.session_id;
      const auto [entry, first] = found.try_emplace(id);
      if (first) {
        for (const ShardEndpoint& shard : shards_) {
          entry->second.placement.push_back({.shard = shard.address, .address = "", .layers = {}});
        }
        epochs[id].assign(shards_.size(), 0);
      }
      AddPart(session, s, entry->second, epochs[id]);
    }
  }
  std::vector<QuarantineSummary> summaries;
  for (auto& [id, summary] : found) {
    summary.install.layers.clear();
    for (const PlacedLayers& placed : summary.placement) {
      summary.install.layers.insert(summary.install.layers.end(), placed.layers.begin(), placed.layers.end());
    }
    absl::c_sort(summary.install.layers);
    summaries.push_back(std::move(summary));
  }
  return summaries;
}

absl::StatusOr<QuarantineSummary> Coordinator::FindQuarantined(absl::string_view name, uint64_t session_id) const {
  PRECONDOR_ASSIGN_OR_RETURN(std::vector<QuarantineSummary> listed, ListQuarantined());
  std::erase_if(listed, [&](const QuarantineSummary& one) {
    return one.install.spec.name != name || (session_id != 0 && one.install.session_id != session_id);
  });
  if (listed.size() == 1) return std::move(listed.front());
  if (listed.empty()) {
    return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                          absl::StrCat("session \"", name, "\"", session_id == 0 ? "" : " with id ",
                                       session_id == 0 ? "" : absl::StrCat(session_id), ": not in quarantine"));
  }
  const auto id = [](std::string* out, const QuarantineSummary& one) { absl::StrAppend(out, one.install.session_id); };
  return absl::FailedPreconditionError(
      absl::StrCat("session \"", name, "\": several are in quarantine, say which: ", absl::StrJoin(listed, ", ", id)));
}

absl::StatusOr<CoordinatorSessionSummary> Coordinator::AdoptSession(absl::string_view name, uint64_t session_id) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  SessionLock locked(*this, name, /*create=*/true);
  if (locked.state() != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("session \"", name, "\": one of that name is open; close it before another is adopted"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const QuarantineSummary found, FindQuarantined(name, session_id));
  const SessionInstall& install = found.install;
  if (install.layers.size() != install.spec.layers.size()) {
    return absl::FailedPreconditionError(absl::StrCat("session \"", name, "\": shards have ", install.layers.size(),
                                                      " of its ", install.spec.layers.size(),
                                                      " layers in quarantine, expected all"));
  }
  const uint64_t id = install.session_id;
  const TenantSession counted{.tenants = install.access.tenants, .bytes = CountedBytes(install.spec)};
  {
    MutexLock lock(mu_);
    ids_.NoteUsed(id);
    opening_[id] = counted;
  }
  const auto opened = absl::MakeCleanup([this, id] {
    MutexLock lock(mu_);
    opening_.erase(id);
  });
  SessionRecord record{.session_id = id,
                       .spec = install.spec,
                       .placement = found.placement,
                       .membership = NextMembership(install),
                       .lease = StepLeases::First(install.spec, options_.lease_steps),
                       .access = install.access};
  record.lease.durable_through += found.last_step;
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (record.placement[s].layers.empty()) continue;
    PRECONDOR_ASSIGN_OR_RETURN(const ShardDescription description, shards_[s].control->Describe());
    record.placement[s].address =
        description.advertise_address.empty() ? shards_[s].address : description.advertise_address;
  }
  auto session = std::make_shared<CoordinatorSession>(record, options_.lease_steps, counted.bytes);
  // If this fails before the record is written, the next Reconcile finds a session that no coordinator knows.
  PRECONDOR_RETURN_IF_ERROR(InstallOnShards(MakeInstalls(*session)));
  PRECONDOR_RETURN_IF_ERROR(journal_.Write([&] { return record; },
                                           [&] {
                                             MutexLock lock(mu_);
                                             sessions_.Add(session);
                                           }));
  locked.SetState(session);
  observer_.OnSessionOpened(name);
  observer_.OnEpoch(name, session->members().epoch(), 0, install.spec.world_size);
  PublishCount();
  logger_.Log(
      Severity::kInfo, "session adopted",
      {{"session", name}, {"session_id", id}, {"epoch", session->members().epoch()}, {"last_step", found.last_step}});
  MutexLock lock(mu_);
  return MakeSummary(*session);
}

absl::Status Coordinator::DeleteQuarantined(absl::string_view name, uint64_t session_id) {
  PRECONDOR_ASSIGN_OR_RETURN(const QuarantineSummary found, FindQuarantined(name, session_id));
  const uint64_t id = found.install.session_id;
  SessionLock locked(*this, name, /*create=*/true);  // keeps the session from being adopted meanwhile
  if (Find(id) != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("session \"", name, "\" is open; close it instead"));
  }
  for (size_t s = 0; s < shards_.size(); ++s) PRECONDOR_RETURN_IF_ERROR(shards_[s].control->Remove(id).status());
  logger_.Log(Severity::kWarning, "quarantined session deleted", {{"session", name}, {"session_id", id}});
  return absl::OkStatus();
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Restores a coordinator from its journal when it begins to lead, and writes the journal while it leads.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/leader_calls.h"
#include "server/core/coordinator/session_messages.h"

namespace precondor {

namespace {

// The state that a journal's records describe.
struct Journalled {
  std::map<uint64_t, SessionRecord> sessions;
  std::map<uint64_t, SessionRecord> ending;  // a ClosingRecord was written
  std::map<uint64_t, std::vector<SnapshotEntry>> snapshots;
  uint64_t last_token = 0;
};

Journalled ReadRecords(absl::Span<const CoordinatorRecord> records) {
  Journalled read;
  auto& sessions = read.sessions;
  for (const CoordinatorRecord& record : records) {
    if (const auto* opened = std::get_if<SessionRecord>(&record)) {
      // An open session of that name was never announced: the write of its record failed, or seemed to.
      std::erase_if(sessions, [&](const auto& entry) { return entry.second.spec.name == opened->spec.name; });
      sessions.insert_or_assign(opened->session_id, *opened);
    } else if (const auto* membership = std::get_if<MembershipRecord>(&record)) {
      if (auto found = sessions.find(membership->session_id); found != sessions.end()) {
        found->second.membership = membership->membership;
      }
    } else if (const auto* lease = std::get_if<LeaseRecord>(&record)) {
      if (auto found = sessions.find(lease->session_id); found != sessions.end()) {
        found->second.lease = lease->lease;
      }
    } else if (const auto* taken = std::get_if<SnapshotsRecord>(&record)) {
      read.snapshots[taken->session_id] = taken->snapshots;
    } else if (const auto* closing = std::get_if<ClosingRecord>(&record)) {
      auto found = sessions.find(closing->session_id);
      if (found != sessions.end()) read.ending.insert(sessions.extract(found));
    } else if (const auto* led = std::get_if<LeaderRecord>(&record)) {
      read.last_token = std::max(read.last_token, led->token);
    } else if (const auto* closed = std::get_if<CloseRecord>(&record)) {
      sessions.erase(closed->session_id);
      read.ending.erase(closed->session_id);
    }
  }
  return read;
}

}  // namespace

void Coordinator::RestoreEnding(uint64_t session_id, SessionRecord record) {
  std::vector<PlacedLayers> placement(shards_.size());
  for (size_t s = 0; s < shards_.size(); ++s) {
    for (const PlacedLayers& placed : record.placement) {
      if (placed.shard == shards_[s].address) placement[s] = placed;
    }
  }
  record.placement = std::move(placement);
  auto state = std::make_shared<CoordinatorSession>(std::move(record), options_.lease_steps);
  MutexLock lock(mu_);
  ids_.NoteUsed(session_id);
  ending_.Add(std::move(state));
}

absl::Status Coordinator::Restore(absl::Span<const CoordinatorRecord> records) {
  Journalled read = ReadRecords(records);
  for (auto& [id, record] : read.ending) RestoreEnding(id, std::move(record));
  for (auto& [id, record] : read.sessions) {
    std::vector<PlacedLayers> placement;
    for (const ShardEndpoint& shard : shards_)
      placement.push_back({.shard = shard.address, .address = "", .layers = {}});
    for (PlacedLayers& placed : record.placement) {
      if (placed.layers.empty()) continue;
      // The only shard of role `all` is its own; earlier versions named it by its address.
      if (shards_.size() == 1 && !shards_[0].control->own_address().empty()) placed.shard = shards_[0].address;
      const auto found = std::find_if(placement.begin(), placement.end(),
                                      [&](const PlacedLayers& place) { return place.shard == placed.shard; });
      if (found == placement.end()) {
        return absl::FailedPreconditionError(absl::StrCat("session \"", record.spec.name, "\" has ",
                                                          placed.layers.size(), " layers on shard ", placed.shard,
                                                          ", which is not among this coordinator's shards"));
      }
      const std::string own = shards_[static_cast<size_t>(found - placement.begin())].control->own_address();
      if (!own.empty()) placed.address = own;
      *found = std::move(placed);
    }
    record.placement = std::move(placement);
    auto session = std::make_shared<CoordinatorSession>(record, options_.lease_steps, CountedBytes(record.spec));
    session->Adopt(SnapshotsRecord{.session_id = id, .snapshots = std::move(read.snapshots[id])});
    observer_.OnSessionOpened(record.spec.name);
    ShowLastSnapshot(record.spec.name, session->snapshots().list());
    observer_.OnEpoch(record.spec.name, session->members().epoch(), session->members().joined(),
                      record.spec.world_size);
    logger_.Log(Severity::kInfo, "session restored",
                {{"session", record.spec.name},
                 {"session_id", id},
                 {"epoch", session->members().epoch()},
                 {"joined", session->members().joined()},
                 {"granted_through", MakeDirective(*session).lease_through_step}});
    MutexLock lock(mu_);
    ids_.NoteUsed(id);
    sessions_.MakeEntry(record.spec.name).state = session;
    sessions_.Add(session);
  }
  PRECONDOR_RETURN_IF_ERROR(BecomeLeader(read.last_token));
  {
    MutexLock lock(mu_);
    leads_ = true;
    watch_.Restart(clock_.Now());
  }
  PublishCount();
  return absl::OkStatus();
}

absl::Status Coordinator::BecomeLeader(uint64_t last) {
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t token, journal_.BeginToLead(last, clock_.Wall()));
  for (const ShardEndpoint& shard : shards_) shard.control->BecomeLeader(token);
  logger_.Log(Severity::kInfo, "coordinator leads", {{"fencing_token", token}});
  return absl::OkStatus();
}

std::vector<ShardEndpoint> Coordinator::Watched(std::vector<ShardEndpoint> shards) {
  for (ShardEndpoint& shard : shards) {
    shard.control = std::make_unique<LeaderCalls>(std::move(shard.control), replaced_,
                                                  [this](const absl::Status& why) { StepDown(why); });
  }
  return shards;
}

void Coordinator::StepDown(const absl::Status& why) {
  if (replaced_.exchange(true)) return;
  {
    MutexLock lock(mu_);
    leads_ = false;
  }
  logger_.Log(Severity::kError, "another coordinator has taken over; this one calls no shard any more",
              {{"reason", absl::string_view(why.message())}});
  if (options_.on_replaced) options_.on_replaced(why);
}

// The errors have no reason code: clients ask again, and may then reach the coordinator that leads.
absl::Status Coordinator::CheckLeads() const {
  if (replaced_.load()) return absl::UnavailableError("another coordinator has taken over");
  MutexLock lock(mu_);
  if (leads_) return absl::OkStatus();
  return absl::UnavailableError("this coordinator stands by and does not lead; its log says what it waits for");
}

absl::Status Coordinator::WriteChange(CoordinatorSession& session, absl::FunctionRef<CoordinatorRecord()> plan) {
  CoordinatorRecord record;
  const auto make = [&] {
    MutexLock lock(mu_);
    return record = plan();
  };
  absl::Status written = journal_.Write(make, [&] {
    MutexLock lock(mu_);
    session.Adopt(record);
  });
  if (!written.ok()) {
    MutexLock lock(mu_);
    session.NoteInDoubt(record);
  }
  return written;
}

absl::Status Coordinator::WriteMembership(CoordinatorSession& session, const Membership& next) {
  return WriteChange(session, [&] { return MembershipRecord{.session_id = session.id(), .membership = next}; });
}

void Coordinator::AddRecords(std::vector<CoordinatorRecord>& records) const {
  MutexLock lock(mu_);
  for (const auto& [id, session] : sessions_.by_id()) {
    records.emplace_back(session->record());
    const std::vector<SnapshotEntry>& snapshots = session->snapshots().list();
    if (!snapshots.empty()) records.emplace_back(SnapshotsRecord{.session_id = id, .snapshots = snapshots});
  }
  ending_.AddRecords(records);
}

void Coordinator::WriteLease(CoordinatorSession& session) {
  std::optional<LeaseTerms> lease;
  std::vector<ModeInterval> before;
  FallbackDecision decision;
  bool returns = false;
  {
    MutexLock lock(mu_);
    lease = session.BeginLeaseWrite();
    if (!lease.has_value()) return;
    before = session.leases().durable().schedule;
    decision = session.mode_policy().decision();
    returns = ReturnsToSecondOrder(before, lease->schedule);
  }
  if (returns && !HoldFactors(session).ok()) {
    MutexLock lock(mu_);
    return session.StayInFirstOrder();
  }
  const absl::Status written =
      WriteChange(session, [&] { return LeaseRecord{.session_id = session.id(), .lease = *lease}; });
  if (!written.ok() || before == lease->schedule) return;
  observer_.OnModeChange(session.spec().name, lease->schedule.back().mode);
  const ModeInterval& last = lease->schedule.back();
  // The audit log: the decision and its inputs.
  logger_.Log(Severity::kInfo, "mode changes",
              {{"session", session.spec().name},
               {"mode", ModeName(last.mode)},
               {"from_step", last.first_step},
               {"rule", FallbackReasonName(decision.reason)},
               {"reason", decision.sentence},
               {"step", decision.inputs.step},
               {"loss", decision.inputs.loss},
               {"rate", decision.inputs.rate},
               {"threshold_rate", decision.inputs.threshold_rate},
               {"phase_steps", decision.inputs.phase_steps},
               {"streak_steps", static_cast<int64_t>(decision.inputs.streak_steps)}});
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_sessions.h"

#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/api/shard_journal.h"
#include "server/core/shard/shard_session.h"

namespace precondor {
namespace {

absl::Status NotYet(uint64_t session_id) {
  return ReasonedStatus(
      absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
      absl::StrCat("session_id ", session_id, ": being removed, or on its way to or from quarantine"));
}

absl::Status WhyEnded(const std::string& name, Removal how) {
  if (how == Removal::kQuarantine) {
    return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                          absl::StrCat("session \"", name, "\": no coordinator knows it"));
  }
  return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kUnknownSession,
                        absl::StrCat("session \"", name, "\" has been closed"));
}

}  // namespace

void ShardSessions::CountSessions() const { shard_.observer.OnShardSessions(static_cast<int64_t>(sessions_.size())); }

void ShardSessions::CountQuarantined() const {
  shard_.observer.OnQuarantinedSessions(static_cast<int64_t>(quarantined_.size()));
}

absl::StatusOr<std::shared_ptr<ShardSession>> ShardSessions::Find(uint64_t session_id) const {
  {
    MutexLock lock(mu_);
    if (quarantined_.contains(session_id)) {
      return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                            absl::StrCat("session_id ", session_id, ": in quarantine, since no coordinator knows it"));
    }
  }
  return FindAny(session_id);
}

absl::StatusOr<std::shared_ptr<ShardSession>> ShardSessions::FindAny(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  if (found != sessions_.end()) return found->second;
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session_id ", session_id, ": no such session on this shard"));
}

absl::StatusOr<std::shared_ptr<ShardSession>> ShardSessions::FindByName(absl::string_view name) const {
  for (std::shared_ptr<ShardSession>& session : All()) {
    if (session->spec().name == name) return std::move(session);
  }
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session \"", name, "\": not on this shard"));
}

std::vector<std::shared_ptr<ShardSession>> ShardSessions::All() const {
  std::vector<std::shared_ptr<ShardSession>> sessions;
  {
    MutexLock lock(mu_);
    for (const auto& [id, session] : sessions_) {
      if (!quarantined_.contains(id)) sessions.push_back(session);
    }
  }
  return sessions;
}

bool ShardSessions::Insert(const std::shared_ptr<ShardSession>& session) {
  const uint64_t id = session->id();
  MutexLock lock(mu_);
  const auto found = quarantined_.find(id);
  const bool stored = found != quarantined_.end() && found->second.state != QuarantineState::kReturning;
  const bool inserted = !stored && !removing_.contains(id) && sessions_.try_emplace(id, session).second;
  CountSessions();
  return inserted;
}

absl::StatusOr<std::shared_ptr<ShardSession>> ShardSessions::TakeOut(uint64_t session_id, Removal how) {
  std::shared_ptr<ShardSession> session;
  uint64_t last_step = 0;
  {
    MutexLock lock(mu_);
    const auto found = sessions_.find(session_id);
    if (found == sessions_.end()) return nullptr;
    if (how != Removal::kReplayed && quarantined_.contains(session_id)) return NotYet(session_id);
    session = std::move(found->second);
    sessions_.erase(found);
    removed_.insert(session_id);
    removing_.insert(session_id);
    last_step = session->context().begun_steps.last().step;
    if (how == Removal::kQuarantine) {
      quarantined_[session_id] = {
          .state = QuarantineState::kClosing, .last_step = last_step, .work = session->shared_context()};
      CountQuarantined();
    }
    CountSessions();
  }
  const std::string& name = session->spec().name;
  session->Close(WhyEnded(name, how));
  // Recorded before another session can reserve the memory, so that a replay makes room in this order too.
  if (ShardJournal* const journal = shard_.options.journal; journal != nullptr) {
    if (how == Removal::kQuarantine) {
      journal->Append(QuarantineRecord{.session_id = session_id, .last_step = last_step});
    } else if (how == Removal::kPermanent) {
      journal->Append(RemoveRecord{session_id});
    }
  }
  {
    MutexLock lock(mu_);
    removing_.erase(session_id);
  }
  shard_.memory.Release(session->reserved_bytes());
  shard_.observer.OnSessionRemoved(name);
  return session;
}

absl::StatusOr<bool> ShardSessions::Remove(uint64_t session_id, Removal how) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, TakeOut(session_id, how));
  if (session == nullptr) return false;
  shard_.logger.Log(Severity::kInfo, "session removed",
                    {{"session", session->spec().name}, {"session_id", session_id}});
  return true;
}

uint64_t ShardSessions::NextGeneration(uint64_t session_id) {
  MutexLock lock(mu_);
  if (!removed_.contains(session_id)) return 0;
  return state_generation_.fetch_add(1, std::memory_order_acq_rel) + 1;
}

// --- quarantine -----------------------------------------------------------------------------------------------------

bool ShardSessions::IsQuarantined(uint64_t session_id) const {
  MutexLock lock(mu_);
  return quarantined_.contains(session_id);
}

absl::Status ShardSessions::CheckNotLeaving(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = quarantined_.find(session_id);
  const bool free = !removing_.contains(session_id) &&
                    (found == quarantined_.end() || found->second.state == QuarantineState::kReturning);
  return free ? absl::OkStatus() : NotYet(session_id);
}

void ShardSessions::SetQuarantined(uint64_t session_id, QuarantineState state, uint64_t last_step) {
  MutexLock lock(mu_);
  quarantined_[session_id] = {.state = state, .last_step = last_step, .work = {}};
  CountQuarantined();
}

absl::StatusOr<bool> ShardSessions::Claim(uint64_t session_id, QuarantineState state) {
  MutexLock lock(mu_);
  const auto found = quarantined_.find(session_id);
  if (found == quarantined_.end()) return false;
  if (found->second.state != QuarantineState::kStored) return NotYet(session_id);
  found->second.state = state;
  return true;
}

void ShardSessions::Release(uint64_t session_id, bool gone) {
  MutexLock lock(mu_);
  if (gone) {
    quarantined_.erase(session_id);
  } else {
    quarantined_[session_id].state = QuarantineState::kStored;
  }
  CountQuarantined();
}

std::vector<std::pair<uint64_t, uint64_t>> ShardSessions::ClaimClosed() {
  std::vector<std::pair<uint64_t, uint64_t>> closed;
  MutexLock lock(mu_);
  for (auto& [id, session] : quarantined_) {
    if (session.state != QuarantineState::kClosing || !session.work.expired()) continue;
    session.state = QuarantineState::kWriting;
    closed.emplace_back(id, session.last_step);
  }
  return closed;
}

}  // namespace precondor

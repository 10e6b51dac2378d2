// SPDX-License-Identifier: Apache-2.0
// Sessions that the coordinator does not know. They leave memory at once; the journal puts what the disk has of one
// aside when the last work on it has ended, so that no record of it comes later.
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/session_context.h"
#include "server/core/shard.h"
#include "server/core/shard_session.h"

namespace precondor {

absl::Status Shard::NotYet(uint64_t session_id) {
  return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                        absl::StrCat("session_id ", session_id, ": on its way to or from quarantine"));
}

bool Shard::IsAside(uint64_t session_id) const {
  MutexLock lock(mu_);
  return aside_.contains(session_id);
}

absl::Status Shard::CheckNotAside(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = aside_.find(session_id);
  const bool free = found == aside_.end() || found->second.state == Aside::State::kReturning;
  return free ? absl::OkStatus() : NotYet(session_id);
}

void Shard::SetAside(uint64_t session_id, Aside aside) {
  MutexLock lock(mu_);
  aside_[session_id] = std::move(aside);
  context_->observer.OnQuarantinedSessions(static_cast<int64_t>(aside_.size()));
}

absl::StatusOr<bool> Shard::Claim(uint64_t session_id, Aside::State to) {
  MutexLock lock(mu_);
  const auto found = aside_.find(session_id);
  if (found == aside_.end()) return false;
  if (found->second.state != Aside::State::kThere) return NotYet(session_id);
  found->second.state = to;
  return true;
}

void Shard::Release(uint64_t session_id, bool gone) {
  MutexLock lock(mu_);
  if (gone) {
    aside_.erase(session_id);
  } else {
    aside_[session_id].state = Aside::State::kThere;
  }
  context_->observer.OnQuarantinedSessions(static_cast<int64_t>(aside_.size()));
}

absl::StatusOr<bool> Shard::Quarantine(uint64_t session_id) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  return PutAside(session_id, /*whole=*/true);
}

absl::StatusOr<bool> Shard::PutAside(uint64_t session_id, bool whole) {
  ShardJournal* const journal = context_->options.journal;
  const absl::Status possible =
      journal == nullptr ? absl::UnimplementedError("") : journal->CheckQuarantine(session_id);
  if (absl::IsUnimplemented(possible)) return RemoveRecorded(session_id, true);
  if (whole) PRECONDOR_RETURN_IF_ERROR(possible);
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session,
                             TakeOut(session_id, /*aside=*/true, /*record=*/true));
  if (session == nullptr) return false;
  context_->logger.Log(Severity::kWarning, "session goes to quarantine",
                       {{"session", session->spec().name},
                        {"session_id", session_id},
                        {"reason", possible.ok() ? "the coordinator does not know it; precondorctl session adopt "
                                                   "brings it back"
                                                 : absl::string_view(possible.message())}});
  return true;
}

void Shard::CompleteQuarantine() {
  ShardJournal* const journal = context_->options.journal;
  if (journal == nullptr || !CheckServing().ok()) return;
  std::vector<std::pair<uint64_t, uint64_t>> ready;  // session and its last step
  {
    MutexLock lock(mu_);
    for (auto& [id, aside] : aside_) {
      if (aside.state != Aside::State::kParting || !aside.work.expired()) continue;
      aside.state = Aside::State::kWriting;
      ready.emplace_back(id, aside.last_step);
    }
  }
  for (const auto& [id, last_step] : ready) {
    const absl::Status written = journal->Quarantine(id, last_step);
    if (written.ok() || absl::IsNotFound(written)) {
      Release(id, /*gone=*/!written.ok());
    } else {
      SetAside(id, {.state = Aside::State::kParting, .last_step = last_step, .work = {}});
    }
    if (written.ok()) continue;
    context_->logger.Log(
        Severity::kWarning,
        absl::IsNotFound(written) ? "nothing to keep in quarantine" : "quarantine not written; tried again",
        {{"session_id", id}, {"reason", absl::string_view(written.message())}});
  }
  for (const uint64_t id : journal->AgeQuarantined(context_->options.quarantine_time)) {
    const absl::StatusOr<bool> deleted = RemoveAside(id);
    context_->logger.Log(
        Severity::kWarning, deleted.ok() ? "quarantined session deleted" : "quarantined session cannot be deleted",
        {{"session_id", id},
         {"reason", deleted.ok() ? "its time there is over" : absl::string_view(deleted.status().message())}});
  }
}

absl::StatusOr<std::vector<QuarantinedSession>> Shard::ListQuarantined() {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  if (context_->options.journal == nullptr) return std::vector<QuarantinedSession>();
  return context_->options.journal->ListQuarantined();
}

absl::StatusOr<bool> Shard::RemoveAside(uint64_t session_id) {
  PRECONDOR_ASSIGN_OR_RETURN(const bool claimed, Claim(session_id, Aside::State::kDeleting));
  if (!claimed) return false;
  absl::StatusOr<bool> existed = context_->options.journal->DeleteQuarantined(session_id);
  Release(session_id, /*gone=*/existed.ok());
  return existed;
}

absl::StatusOr<bool> Shard::BringBack(uint64_t session_id) {
  PRECONDOR_ASSIGN_OR_RETURN(const bool claimed, Claim(session_id, Aside::State::kReturning));
  if (!claimed) return false;
  if (const absl::Status returned = ReturnClaimed(session_id); !returned.ok()) {
    RemoveRecorded(session_id, false).IgnoreError();
    Release(session_id, /*gone=*/false);
    return ReasonedStatus(returned.code(), GetErrorReason(returned),
                          absl::StrCat("session_id ", session_id, ": not back from quarantine: ", returned.message()));
  }
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = FindAny(session_id);
  if (session.ok()) (*session)->FinishReplay();
  context_->logger.Log(Severity::kInfo, "session back from quarantine", {{"session_id", session_id}});
  return true;
}

absl::Status Shard::ReturnClaimed(uint64_t session_id) {
  ShardJournal* const journal = context_->options.journal;
  for (const QuarantinedSession& session : journal->ListQuarantined()) {
    if (session.install.session_id != session_id) continue;
    PRECONDOR_RETURN_IF_ERROR(CheckNotDraining(session.install.spec.name));
    PRECONDOR_RETURN_IF_ERROR(ReplaceSameNameSession(session.install));
  }
  return journal->Return(session_id, *this);
}

absl::Status Shard::CheckReplayed(uint64_t session_id) {
  MutexLock lock(mu_);
  const auto no_room = no_room_.find(session_id);
  absl::Status crowded = no_room == no_room_.end() ? absl::OkStatus() : no_room->second;
  no_room_.erase(session_id);
  const bool lost = given_up_.erase(session_id) > 0;
  if (!crowded.ok()) return crowded;
  if (!lost && sessions_.contains(session_id)) return absl::OkStatus();
  return absl::DataLossError("what the disk has of it is not whole; the log of the shard says what is missing");
}

}  // namespace precondor

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
namespace {

absl::Status NotYet(uint64_t session_id) {
  return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                        absl::StrCat("session_id ", session_id, ": on its way to or from quarantine"));
}

}  // namespace

bool Shard::IsAside(uint64_t session_id) const {
  MutexLock lock(mu_);
  return aside_.contains(session_id);
}

void Shard::SetAside(uint64_t session_id, bool aside) {
  MutexLock lock(mu_);
  if (aside) {
    aside_.insert(session_id);
  } else {
    aside_.erase(session_id);
  }
  context_->observer.OnQuarantinedSessions(static_cast<int64_t>(aside_.size()));
}

absl::StatusOr<bool> Shard::Quarantine(uint64_t session_id) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  PRECONDOR_ASSIGN_OR_RETURN(const bool existed, PutAside(session_id, true));
  SettleQuarantine();
  return existed;
}

absl::StatusOr<bool> Shard::PutAside(uint64_t session_id, bool record) {
  ShardJournal* const journal = context_->options.journal;
  const absl::Status possible =
      journal == nullptr ? absl::UnimplementedError("") : journal->CheckQuarantine(session_id);
  if (absl::IsUnimplemented(possible)) return RemoveRecorded(session_id, record);
  PRECONDOR_RETURN_IF_ERROR(possible);
  const std::shared_ptr<ShardSession> session = TakeOut(session_id, /*aside=*/true);
  if (session == nullptr) return false;
  context_->logger.Log(Severity::kWarning, "session goes to quarantine",
                       {{"session", session->spec().name},
                        {"session_id", session_id},
                        {"reason", "the coordinator does not know it; precondorctl session adopt brings it back"}});
  return true;
}

void Shard::SettleQuarantine() {
  ShardJournal* const journal = context_->options.journal;
  if (journal == nullptr || !CheckServing().ok()) return;
  std::vector<std::pair<uint64_t, uint64_t>> ready;  // session and its last step
  {
    MutexLock lock(mu_);
    for (auto& [id, parting] : parting_) {
      if (parting.busy || !parting.work.expired()) continue;
      parting.busy = true;
      ready.emplace_back(id, parting.last_step);
    }
  }
  for (const auto& [id, last_step] : ready) {
    const absl::Status written = journal->Quarantine(id, last_step);
    {
      MutexLock lock(mu_);
      if (written.ok()) {
        parting_.erase(id);
      } else {
        parting_[id].busy = false;
      }
    }
    if (written.ok()) continue;
    context_->logger.Log(Severity::kWarning, "quarantine not written; tried again",
                         {{"session_id", id}, {"reason", absl::string_view(written.message())}});
  }
  const std::vector<uint64_t> expired = journal->AgeQuarantined(context_->options.quarantine_time);
  for (const uint64_t id : expired) {
    const absl::StatusOr<bool> deleted = journal->DeleteQuarantined(id);
    if (deleted.ok()) SetAside(id, false);
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
  SettleQuarantine();
  {
    MutexLock lock(mu_);
    if (parting_.contains(session_id) || returning_.contains(session_id)) return NotYet(session_id);
    if (!aside_.contains(session_id)) return false;
  }
  PRECONDOR_ASSIGN_OR_RETURN(const bool existed, context_->options.journal->DeleteQuarantined(session_id));
  SetAside(session_id, false);
  return existed;
}

absl::StatusOr<bool> Shard::BringBack(uint64_t session_id) {
  {
    MutexLock lock(mu_);
    if (returning_.contains(session_id)) return NotYet(session_id);
    if (!aside_.contains(session_id)) return false;
  }
  SettleQuarantine();
  ShardJournal* const journal = context_->options.journal;
  for (const QuarantinedSession& session : journal->ListQuarantined()) {
    if (session.install.session_id != session_id) continue;
    PRECONDOR_RETURN_IF_ERROR(CheckNotDraining(session.install.spec.name));
    PRECONDOR_RETURN_IF_ERROR(ReplaceNamesake(session.install, true));
  }
  {
    MutexLock lock(mu_);
    if (parting_.contains(session_id) || !returning_.insert(session_id).second) return NotYet(session_id);
  }
  if (absl::Status returned = journal->Return(session_id, *this); !returned.ok()) {
    RemoveRecorded(session_id, false).IgnoreError();
    MutexLock lock(mu_);
    returning_.erase(session_id);
    return ReasonedStatus(returned.code(), GetErrorReason(returned),
                          absl::StrCat("session_id ", session_id, ": not back from quarantine: ", returned.message()));
  }
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = FindAny(session_id);
  if (session.ok()) (*session)->FinishReplay();
  context_->logger.Log(Severity::kInfo, "session back from quarantine", {{"session_id", session_id}});
  return true;
}

void Shard::EndReturn(uint64_t session_id) {
  SetAside(session_id, false);
  MutexLock lock(mu_);
  returning_.erase(session_id);
}

absl::Status Shard::CheckReplayed(uint64_t session_id) {
  MutexLock lock(mu_);
  const auto no_room = no_room_.find(session_id);
  const absl::Status crowded = no_room == no_room_.end() ? absl::OkStatus() : no_room->second;
  no_room_.erase(session_id);
  const bool lost = given_up_.erase(session_id) > 0;
  if (!crowded.ok()) return crowded;
  if (!lost && sessions_.contains(session_id)) return absl::OkStatus();
  return absl::DataLossError("what the disk has of it is not whole; the log of the shard says what is missing");
}

}  // namespace precondor

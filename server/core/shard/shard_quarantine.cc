// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_quarantine.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/api/shard_journal.h"
#include "server/core/shard/shard_session.h"

namespace precondor {

absl::StatusOr<bool> ShardQuarantine::Put(uint64_t session_id) { return Take(session_id, /*even_with_gaps=*/false); }

absl::StatusOr<bool> ShardQuarantine::Take(uint64_t session_id, bool even_with_gaps) {
  ShardJournal* const journal = shard_.options.journal;
  const absl::Status possible =
      journal == nullptr ? absl::UnimplementedError("") : journal->CheckQuarantine(session_id);
  if (absl::IsUnimplemented(possible)) return sessions_.Remove(session_id, Removal::kPermanent);
  if (!even_with_gaps) PRECONDOR_RETURN_IF_ERROR(possible);
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session,
                             sessions_.TakeOut(session_id, Removal::kQuarantine));
  if (session == nullptr) return false;
  shard_.logger.Log(Severity::kWarning, "session goes to quarantine",
                    {{"session", session->spec().name},
                     {"session_id", session_id},
                     {"reason", possible.ok() ? "the coordinator does not know it; its files stay"
                                              : absl::string_view(possible.message())}});
  return true;
}

absl::Status ShardQuarantine::ReplaceSameNameSession(const SessionInstall& install) {
  uint64_t older = 0;
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) {
    if (session->spec().name != install.spec.name || session->id() == install.session_id) continue;
    if (session->id() > install.session_id) {
      return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
                            absl::StrCat("session \"", install.spec.name, "\": session_id ", session->id(),
                                         " has replaced ", install.session_id));
    }
    older = session->id();
  }
  if (older == 0) return absl::OkStatus();
  // Names are unique on a coordinator, so it has forgotten the older session, and nothing else would free it.
  shard_.logger.Log(Severity::kWarning, "session replaced by a later one of the same name",
                    {{"session", install.spec.name}, {"session_id", older}});
  return Take(older, /*even_with_gaps=*/true).status();
}

void ShardQuarantine::Complete() {
  ShardJournal* const journal = shard_.options.journal;
  if (journal == nullptr || !serving_.Check().ok()) return;
  for (const auto& [id, last_step] : sessions_.ClaimClosed()) {
    const absl::Status written = journal->Quarantine(id, last_step);
    if (written.ok() || absl::IsNotFound(written)) {
      sessions_.Release(id, /*gone=*/!written.ok());
    } else {
      sessions_.SetQuarantined(id, QuarantineState::kClosing, last_step);
    }
    if (written.ok()) continue;
    shard_.logger.Log(
        Severity::kWarning,
        absl::IsNotFound(written) ? "nothing to keep in quarantine" : "quarantine not written; tried again",
        {{"session_id", id}, {"reason", absl::string_view(written.message())}});
  }
  for (const uint64_t id : journal->AgeQuarantined(shard_.options.quarantine_time)) {
    const absl::StatusOr<bool> deleted = Delete(id);
    shard_.logger.Log(
        Severity::kWarning, deleted.ok() ? "quarantined session deleted" : "quarantined session cannot be deleted",
        {{"session_id", id},
         {"reason", deleted.ok() ? "its time there is over" : absl::string_view(deleted.status().message())}});
  }
}

absl::StatusOr<bool> ShardQuarantine::Delete(uint64_t session_id) {
  PRECONDOR_ASSIGN_OR_RETURN(const bool claimed, sessions_.Claim(session_id, QuarantineState::kDeleting));
  if (!claimed) return false;
  absl::StatusOr<bool> existed = shard_.options.journal->DeleteQuarantined(session_id);
  sessions_.Release(session_id, /*gone=*/existed.ok());
  return existed;
}

absl::StatusOr<bool> ShardQuarantine::BringBack(uint64_t session_id, ShardReplay& replay) {
  PRECONDOR_ASSIGN_OR_RETURN(const bool claimed, sessions_.Claim(session_id, QuarantineState::kReturning));
  if (!claimed) return false;
  if (const absl::Status returned = ReturnClaimed(session_id, replay); !returned.ok()) {
    sessions_.Remove(session_id, Removal::kReplayed).IgnoreError();
    sessions_.Release(session_id, /*gone=*/false);
    return ReasonedStatus(returned.code(), GetErrorReason(returned),
                          absl::StrCat("session_id ", session_id, ": not back from quarantine: ", returned.message()));
  }
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.FindAny(session_id);
  if (session.ok()) (*session)->FinishReplay();
  shard_.logger.Log(Severity::kInfo, "session back from quarantine", {{"session_id", session_id}});
  return true;
}

absl::Status ShardQuarantine::ReturnClaimed(uint64_t session_id, ShardReplay& replay) {
  ShardJournal* const journal = shard_.options.journal;
  for (const QuarantinedSession& session : journal->ListQuarantined()) {
    if (session.install.session_id != session_id) continue;
    PRECONDOR_RETURN_IF_ERROR(serving_.CheckNotDraining(session.install.spec.name));
    PRECONDOR_RETURN_IF_ERROR(ReplaceSameNameSession(session.install));
  }
  return journal->Return(session_id, replay);
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Shared by the operations of a coordinator: its state under a lock, its journal, its shards, and common steps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/registry.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/observer.h"
#include "server/core/api/shard_control.h"
#include "server/core/coordinator/coordinator_options.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/coordinator_state.h"
#include "server/core/coordinator/journal_writer.h"
#include "server/core/coordinator/reconcile.h"
#include "server/core/coordinator/shard_watch.h"

namespace precondor {

// One per coordinator. Thread-safe. Lock order: the journal's lock, mu.
struct CoordinatorContext {
  // See Coordinator.
  CoordinatorContext(CoordinatorOptions options, std::vector<ShardEndpoint> shards, CoordinatorJournal& journal,
                     const Clock& clock, Logger& logger, Observer& observer);

  // Returns UNAVAILABLE unless this coordinator leads.
  absl::Status CheckLeads() const;
  // Returns the open session, or null.
  std::shared_ptr<CoordinatorSession> Find(uint64_t session_id) const;
  // Writes a MembershipRecord, LeaseRecord or SnapshotsRecord, and makes the session adopt it. No other record is
  // written in between.
  absl::Status Write(CoordinatorSession& session, const CoordinatorRecord& record);
  // Reports the number of open sessions to the observer.
  void PublishCount();

  const CoordinatorOptions options;
  std::atomic<bool> replaced = false;  // by another coordinator, as a shard has reported
  const std::vector<ShardEndpoint> shards;
  const Clock& clock;
  Logger& logger;
  Observer& observer;
  JournalWriter journal;
  mutable Mutex mu;
  CondVar name_freed;
  std::set<std::string, std::less<>> busy_names ABSL_GUARDED_BY(mu);  // of SessionLocks
  CoordinatorState state ABSL_GUARDED_BY(mu);
  ShardWatch watch ABSL_GUARDED_BY(mu);

 private:
  // Stops leading, because a shard has refused a call: another coordinator leads.
  void StepDown(const absl::Status& why);
  std::vector<ShardEndpoint> Watched(std::vector<ShardEndpoint> endpoints);
};

// Exclusive access of one operation to the session of a name. Other operations that change the session wait. So shards
// receive changes in order, although no mutex is held during calls.
class SessionLock {
 public:
  // Waits for the name. If no session has it and it is not `opens`, locks nothing.
  SessionLock(CoordinatorContext& c, absl::string_view name, bool opens = false);
  ~SessionLock();
  SessionLock(const SessionLock&) = delete;
  SessionLock& operator=(const SessionLock&) = delete;

  // Returns the session that had the name at the beginning, or null.
  const std::shared_ptr<CoordinatorSession>& session() const { return session_; }

 private:
  CoordinatorContext& c_;
  const std::string name_;
  std::shared_ptr<CoordinatorSession> session_;
  bool locks_ = false;
};

// Steps that several operations share. They call shards or write the journal. Precondition of those with a session: the
// caller holds its SessionLock, or the session is not open yet; WriteLease needs none.

// --- coordinator_shards.cc ------------------------------------------------------------------------------------------
// Installs the session on all its shards. Stops at the first that fails.
absl::Status InstallOnShards(const CoordinatorContext& c, const std::vector<SessionInstall>& installs);
// Removes an ending session from one shard, unless the shard has already confirmed that.
absl::Status RemoveEnding(CoordinatorContext& c, uint64_t session_id, size_t shard);
// Writes the CloseRecord of an ending session that every shard has removed.
void WriteClose(CoordinatorContext& c, uint64_t session_id);
// Carries out an action. Returns an error if a shard did not do it; the next Reconcile finds it again.
absl::Status CarryOut(CoordinatorContext& c, const CoordinatorAction& action);

// --- coordinator_members.cc -----------------------------------------------------------------------------------------
// Tells the session's shards the membership, unless they know it.
absl::Status TellShards(CoordinatorContext& c, CoordinatorSession& session);

// --- coordinator.cc -------------------------------------------------------------------------------------------------
// Writes the lease that the session wants to grant, if it wants one.
void WriteLease(CoordinatorContext& c, CoordinatorSession& session);

// --- coordinator_snapshots.cc ---------------------------------------------------------------------------------------
// Begins a snapshot. Returns the errors of Coordinator::CreateSnapshot.
absl::StatusOr<SnapshotEntry> BeginSnapshot(CoordinatorContext& c, CoordinatorSession& session);
// Asks for the parts of the session's last snapshot if it is under way, and writes their progress. Precondition: there
// is a snapshot.
void AdvanceSnapshot(CoordinatorContext& c, CoordinatorSession& session);
// Notes that a shard has lost factors with which the session was to begin: no rank can join any more.
void FailRestore(CoordinatorContext& c, CoordinatorSession& session, const absl::Status& reason);
// Reports the last complete snapshot to the observer.
void ShowLastSnapshot(CoordinatorContext& c, absl::string_view name, const std::vector<SnapshotEntry>& snapshots);

// --- coordinator_opening.cc -----------------------------------------------------------------------------------------
// Returns why no step of the session may be in first order, or "". An averaged gradient in the place of a whole update
// would be plain gradient descent at that update's rate.
std::string WhyNoFirstOrder(const SessionSpec& spec, const MethodSet& methods);

// --- errors ---------------------------------------------------------------------------------------------------------
// Returns NOT_FOUND (UNKNOWN_SESSION). `which` is a quoted name or an id.
inline absl::Status NoSession(const absl::AlphaNum& which) {
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session ", which, ": there is none on this coordinator"));
}

// Returns `status` with `context` in front of its message if it is an error.
inline absl::Status AddContext(const absl::Status& status, const std::string& context) {
  if (status.ok()) return status;
  return ReasonedStatus(status.code(), GetErrorReason(status), absl::StrCat(context, ": ", status.message()));
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Steps that several operations of a coordinator share. They call shards or write the journal. Precondition of those
// with a session: the caller holds its SessionLock, or the session is not open yet; WriteLease needs none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/shard_control.h"
#include "server/core/coordinator/reconcile.h"

namespace precondor {

struct CoordinatorContext;
class CoordinatorSession;

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

// SPDX-License-Identifier: Apache-2.0
// Snapshots of whole sessions: all shards take their parts as of one step, which directives announce to the trainers. A
// snapshot is complete once every part is durable. It fails if a shard fails meanwhile or has lost its part.
#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_context.h"
#include "server/core/coordinator/coordinator_session.h"

namespace precondor {
namespace {

constexpr size_t kComplete = 2;  // number of complete snapshots that are kept
constexpr size_t kListed = 8;

// Returns whether the shard may have received the order although the call failed, so that it is worth repeating.
bool MayAskAgain(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

// Returns the snapshots that are worth remembering, oldest first.
std::vector<SnapshotEntry> Trim(std::vector<SnapshotEntry> snapshots) {
  auto complete = std::count_if(snapshots.begin(), snapshots.end(),
                                [](const SnapshotEntry& one) { return one.state == SnapshotState::kComplete; });
  std::erase_if(snapshots, [&complete](const SnapshotEntry& one) {
    return one.state == SnapshotState::kComplete && static_cast<size_t>(complete--) > kComplete;
  });
  for (auto it = snapshots.begin(); snapshots.size() > kListed && it != snapshots.end();) {
    it = it->state == SnapshotState::kFailed ? snapshots.erase(it) : it + 1;
  }
  return snapshots;
}

// Writes and adopts the snapshot's state.
absl::Status WriteSnapshot(CoordinatorContext& c, CoordinatorSession& session, const SnapshotEntry& snapshot) {
  std::vector<SnapshotEntry> next;
  {
    MutexLock lock(c.mu);
    next = session.snapshots().list();
  }
  std::erase_if(next, [&](const SnapshotEntry& one) { return one.number == snapshot.number; });
  next.push_back(snapshot);
  next = Trim(std::move(next));
  PRECONDOR_RETURN_IF_ERROR(c.Write(session, SnapshotsRecord{.session_id = session.id, .snapshots = next}));
  if (snapshot.state == SnapshotState::kUnderWay) return absl::OkStatus();
  c.observer.OnSessionSnapshot(session.spec.name, snapshot.state == SnapshotState::kComplete);
  ShowLastSnapshot(c, session.spec.name, next);
  return absl::OkStatus();
}

// Returns the snapshot with the shards' progress. `repeated`: all shards have received the order before.
SnapshotEntry AskForParts(CoordinatorContext& c, const CoordinatorSession& session, SnapshotEntry snapshot,
                          bool repeated) {
  SnapshotOrder order;
  bool passed = false;
  std::optional<std::string> failure;
  {
    MutexLock lock(c.mu);
    order = session.snapshots().MakeOrder(session.id, snapshot, repeated);
    passed = session.progress().HasPassed(snapshot.step);
    failure = SessionSnapshots::WhyNotWhole(snapshot, session.members().membership());
  }
  bool whole = true;
  for (SnapshotPart& part : snapshot.parts) {
    if (failure.has_value()) break;
    const auto shard =
        absl::c_find_if(c.shards, [&](const ShardEndpoint& endpoint) { return endpoint.address == part.shard; });
    if (shard == c.shards.end()) continue;
    // A restored part on a shard without a data directory is lost if the shard is restarted.
    if (part.snapshot_id != 0 && !snapshot.restores) continue;
    const absl::StatusOr<SnapshotProgress> progress = shard->control->TakeSnapshot(order);
    if (progress.ok() && progress->durable) part.snapshot_id = progress->snapshot_id;
    whole = whole && part.snapshot_id != 0;
    if (!progress.ok() && !(repeated && MayAskAgain(progress.status()))) {
      failure = absl::StrCat("shard ", part.shard, ": ", progress.status().message());
    } else if (progress.ok() && !progress->begun && passed) {
      failure = absl::StrCat("shard ", part.shard, ": the job has passed the step and nothing of it came there");
    }
  }
  if (failure.has_value()) {
    snapshot.state = SnapshotState::kFailed;
    snapshot.reason = *std::move(failure);
  } else if (whole) {
    snapshot.state = SnapshotState::kComplete;
  }
  return snapshot;
}

// Writes the snapshot to the journal and orders its parts from the shards.
absl::Status OrderSnapshot(CoordinatorContext& c, CoordinatorSession& session, const SnapshotEntry& planned) {
  absl::Status status = WriteSnapshot(c, session, planned);
  if (status.ok()) {
    const SnapshotEntry begun = AskForParts(c, session, planned, /*repeated=*/false);
    if (begun.state == SnapshotState::kFailed) {
      status = absl::FailedPreconditionError(
          absl::StrCat("session \"", session.spec.name, "\" snapshot ", begun.number, ": ", begun.reason));
      // If this write fails, the next Reconcile finds the failure again.
      WriteSnapshot(c, session, begun).IgnoreError();
    }
  }
  c.logger.Log(status.ok() ? Severity::kInfo : Severity::kWarning,
               status.ok() ? "session snapshot begun" : "session snapshot not begun",
               {{"session", session.spec.name},
                {"snapshot", planned.number},
                {"step", planned.step},
                {"restores", planned.restores},
                {"reason", absl::string_view(status.message())}});
  return status;
}

// Orders the restore of a session that has just been opened. Returns the errors of Coordinator::RestoreSession.
absl::StatusOr<CoordinatorSessionSummary> OrderRestore(CoordinatorContext& c, absl::string_view name,
                                                       uint64_t session_id, uint64_t step) {
  const SessionLock locked(c, name);
  if (locked.session() == nullptr || locked.session()->id != session_id) {
    return absl::AbortedError(absl::StrCat("session \"", name, "\": was closed while it was being restored"));
  }
  CoordinatorSession& session = *locked.session();
  SnapshotEntry planned;
  {
    MutexLock lock(c.mu);
    PRECONDOR_ASSIGN_OR_RETURN(planned, session.snapshots().PlanRestore(step, session.members(), session.placement));
  }
  PRECONDOR_RETURN_IF_ERROR(OrderSnapshot(c, session, planned));
  MutexLock lock(c.mu);
  return MakeSummary(session);
}

}  // namespace

void FailRestore(CoordinatorContext& c, CoordinatorSession& session, const absl::Status& reason) {
  std::optional<SnapshotEntry> restored;
  {
    MutexLock lock(c.mu);
    // The first report can have come since the shard was asked.
    if (!session.progress().begun()) restored = session.snapshots().HeldRestored();
  }
  if (!restored.has_value()) return;
  c.logger.Log(Severity::kError, "restored factors are lost",
               {{"session", session.spec.name}, {"step", restored->step}, {"reason", reason.message()}});
  restored->state = SnapshotState::kFailed;
  restored->reason = std::string(reason.message());
  WriteSnapshot(c, session, *restored).IgnoreError();  // the next Reconcile finds it again
}

void ShowLastSnapshot(CoordinatorContext& c, absl::string_view name, const std::vector<SnapshotEntry>& snapshots) {
  std::optional<uint64_t> last;
  for (const SnapshotEntry& one : snapshots) {
    if (one.state == SnapshotState::kComplete) last = std::max(last.value_or(0), one.step);
  }
  if (last.has_value()) c.observer.OnLastSessionSnapshot(name, *last);
}

absl::StatusOr<SnapshotEntry> BeginSnapshot(CoordinatorContext& c, CoordinatorSession& session) {
  SnapshotEntry planned;
  {
    MutexLock lock(c.mu);
    PRECONDOR_ASSIGN_OR_RETURN(planned, session.PlanSnapshot());
  }
  const absl::Status status = OrderSnapshot(c, session, planned);
  {
    MutexLock lock(c.mu);
    session.EndSnapshotPlan();
  }
  PRECONDOR_RETURN_IF_ERROR(status);
  return planned;
}

void AdvanceSnapshot(CoordinatorContext& c, CoordinatorSession& session) {
  SnapshotEntry last;
  {
    MutexLock lock(c.mu);
    last = session.snapshots().list().back();
  }
  if (last.state != SnapshotState::kUnderWay) return;
  const SnapshotEntry now = AskForParts(c, session, last, /*repeated=*/true);
  // The next Reconcile repeats a write that fails.
  if (now == last || !WriteSnapshot(c, session, now).ok() || now.state == SnapshotState::kUnderWay) return;
  const bool complete = now.state == SnapshotState::kComplete;
  c.logger.Log(complete ? Severity::kInfo : Severity::kWarning,
               complete ? "session snapshot complete" : "session snapshot failed",
               {{"session", session.spec.name},
                {"snapshot", now.number},
                {"step", now.step},
                {"reason", absl::string_view(now.reason)}});
}

absl::StatusOr<RestoreResult> Coordinator::RestoreSession(const SessionSpec& spec, uint64_t step,
                                                          const SessionCaller& caller,
                                                          absl::Span<const std::string> rank_devices) {
  if (step > kMaxStep) {
    return ReasonedStatus(
        absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
        absl::StrCat("session \"", spec.name, "\": step: expected at most ", kMaxStep, ", got ", step));
  }
  PRECONDOR_ASSIGN_OR_RETURN(OpenResult opened, OpenSession(spec, caller, rank_devices));
  if (!opened.created) {
    return absl::FailedPreconditionError(absl::StrCat(
        "session \"", spec.name, "\": there is one; close it (precondorctl session close) before it is restored"));
  }
  absl::StatusOr<CoordinatorSessionSummary> ordered = OrderRestore(*context_, spec.name, opened.session_id, step);
  if (!ordered.ok()) {
    CloseSession(spec.name, SessionCaller::Showing(opened.secret)).IgnoreError();  // no rank could ever join it
    return ordered.status();
  }
  return RestoreResult{.secret = std::move(opened.secret), .session = *std::move(ordered)};
}

absl::StatusOr<SnapshotEntry> Coordinator::CreateSnapshot(absl::string_view name) {
  CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  const SessionLock locked(c, name);
  if (locked.session() == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  return BeginSnapshot(c, *locked.session());
}

}  // namespace precondor

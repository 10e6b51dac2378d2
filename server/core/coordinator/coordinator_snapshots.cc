// SPDX-License-Identifier: Apache-2.0
// Snapshots of whole sessions: all shards take their parts as of one step, which directives announce to the trainers. A
// snapshot is complete once every part is durable. It fails if a shard fails meanwhile or has lost its part.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_errors.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_lock.h"
#include "server/core/coordinator/session_messages.h"

namespace precondor {
namespace {

constexpr size_t kComplete = 2;  // number of complete snapshots that are kept
constexpr size_t kListed = 8;

// Returns whether the shard may have received the order although the call failed, so that it is worth repeating.
bool MayAskAgain(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

// Returns whether a regular snapshot is due: all ranks have joined, and the last snapshot is `interval_steps` old.
bool WantsSnapshot(const CoordinatorSession& session, uint64_t interval_steps) {
  return session.members().active() && session.progress().last_step() > 0 &&
         session.snapshots().IsDue(interval_steps, session.leases().first_open_step());
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

}  // namespace

absl::Status Coordinator::WriteSnapshot(CoordinatorSession& session, const SnapshotEntry& snapshot) {
  std::vector<SnapshotEntry> next;
  {
    MutexLock lock(mu_);
    next = session.snapshots().list();
  }
  std::erase_if(next, [&](const SnapshotEntry& one) { return one.number == snapshot.number; });
  next.push_back(snapshot);
  next = Trim(std::move(next));
  PRECONDOR_RETURN_IF_ERROR(
      WriteChange(session, [&] { return SnapshotsRecord{.session_id = session.id(), .snapshots = next}; }));
  if (snapshot.state == SnapshotState::kUnderWay) return absl::OkStatus();
  observer_.OnSessionSnapshot(session.spec().name, snapshot.state == SnapshotState::kComplete);
  ShowLastSnapshot(session.spec().name, next);
  return absl::OkStatus();
}

void Coordinator::FailRestore(CoordinatorSession& session, const absl::Status& reason) {
  std::optional<SnapshotEntry> restored;
  {
    MutexLock lock(mu_);
    // The first report can have come since the shard was asked.
    if (!session.progress().begun()) restored = session.snapshots().HeldRestored();
  }
  if (!restored.has_value()) return;
  logger_.Log(Severity::kError, "restored factors are lost",
              {{"session", session.spec().name}, {"step", restored->step}, {"reason", reason.message()}});
  restored->state = SnapshotState::kFailed;
  restored->reason = std::string(reason.message());
  WriteSnapshot(session, *restored).IgnoreError();  // the next Reconcile finds it again
}

void Coordinator::ShowLastSnapshot(absl::string_view name, const std::vector<SnapshotEntry>& snapshots) {
  std::optional<uint64_t> last;
  for (const SnapshotEntry& one : snapshots) {
    if (one.state == SnapshotState::kComplete) last = std::max(last.value_or(0), one.step);
  }
  if (last.has_value()) observer_.OnLastSessionSnapshot(name, *last);
}

SnapshotEntry Coordinator::AskForParts(const CoordinatorSession& session, SnapshotEntry snapshot, bool repeated) {
  SnapshotOrder order;
  bool passed = false;
  std::optional<std::string> failure;
  {
    MutexLock lock(mu_);
    order = session.snapshots().MakeOrder(session.id(), snapshot, repeated);
    passed = session.progress().HasPassed(snapshot.step);
    failure = SessionSnapshots::WhyNotWhole(snapshot, session.members().membership());
  }
  bool whole = true;
  for (SnapshotPart& part : snapshot.parts) {
    if (failure.has_value()) break;
    const auto shard = std::find_if(shards_.begin(), shards_.end(),
                                    [&](const ShardEndpoint& endpoint) { return endpoint.address == part.shard; });
    if (shard == shards_.end()) continue;
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

absl::StatusOr<SnapshotEntry> Coordinator::BeginSnapshot(CoordinatorSession& session) {
  SnapshotEntry planned;
  {
    MutexLock lock(mu_);
    PRECONDOR_ASSIGN_OR_RETURN(planned, session.PlanSnapshot());
  }
  const absl::Status status = OrderSnapshot(session, planned);
  {
    MutexLock lock(mu_);
    session.EndSnapshotPlan();
  }
  PRECONDOR_RETURN_IF_ERROR(status);
  return planned;
}

absl::Status Coordinator::OrderSnapshot(CoordinatorSession& session, const SnapshotEntry& planned) {
  absl::Status status = WriteSnapshot(session, planned);
  if (status.ok()) {
    const SnapshotEntry begun = AskForParts(session, planned, /*repeated=*/false);
    if (begun.state == SnapshotState::kFailed) {
      status = absl::FailedPreconditionError(
          absl::StrCat("session \"", session.spec().name, "\" snapshot ", begun.number, ": ", begun.reason));
      // If this write fails, the next Reconcile finds the failure again.
      WriteSnapshot(session, begun).IgnoreError();
    }
  }
  logger_.Log(status.ok() ? Severity::kInfo : Severity::kWarning,
              status.ok() ? "session snapshot begun" : "session snapshot not begun",
              {{"session", session.spec().name},
               {"snapshot", planned.number},
               {"step", planned.step},
               {"restores", planned.restores},
               {"reason", absl::string_view(status.message())}});
  return status;
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
  absl::StatusOr<CoordinatorSessionSummary> ordered = OrderRestore(spec.name, opened.session_id, step);
  if (!ordered.ok()) {
    CloseSession(spec.name, SessionCaller::Showing(opened.secret)).IgnoreError();  // no rank could ever join it
    return ordered.status();
  }
  return RestoreResult{.secret = std::move(opened.secret), .session = *std::move(ordered)};
}

absl::StatusOr<CoordinatorSessionSummary> Coordinator::OrderRestore(absl::string_view name, uint64_t session_id,
                                                                    uint64_t step) {
  SessionLock locked(*this, name, /*create=*/false);
  if (locked.state() == nullptr || locked.state()->id() != session_id) {
    return absl::AbortedError(absl::StrCat("session \"", name, "\": was closed while it was being restored"));
  }
  CoordinatorSession& session = *locked.state();
  SnapshotEntry planned;
  {
    MutexLock lock(mu_);
    PRECONDOR_ASSIGN_OR_RETURN(planned, session.snapshots().PlanRestore(step, session.members(), session.placement()));
  }
  PRECONDOR_RETURN_IF_ERROR(OrderSnapshot(session, planned));
  MutexLock lock(mu_);
  return MakeSummary(session);
}

absl::StatusOr<SnapshotEntry> Coordinator::CreateSnapshot(absl::string_view name) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  SessionLock locked(*this, name, /*create=*/false);
  if (locked.state() == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  return BeginSnapshot(*locked.state());
}

void Coordinator::CompleteSnapshots() {
  std::vector<std::string> names;
  {
    MutexLock lock(mu_);
    for (const auto& [id, session] : sessions_.by_id()) names.push_back(session->spec().name);
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    SessionLock locked(*this, name, /*create=*/false);
    if (locked.state() == nullptr) continue;
    CoordinatorSession& session = *locked.state();
    std::optional<SnapshotEntry> last;
    bool due = false;
    {
      MutexLock lock(mu_);
      if (!session.snapshots().list().empty()) last = session.snapshots().list().back();
      due = WantsSnapshot(session, options_.snapshot_interval_steps);
    }
    if (due) BeginSnapshot(session).IgnoreError();
    if (due || !last.has_value() || last->state != SnapshotState::kUnderWay) continue;
    const SnapshotEntry now = AskForParts(session, *last, /*repeated=*/true);
    // The next Reconcile repeats a write that fails.
    if (now == *last || !WriteSnapshot(session, now).ok() || now.state == SnapshotState::kUnderWay) continue;
    const bool complete = now.state == SnapshotState::kComplete;
    logger_.Log(
        complete ? Severity::kInfo : Severity::kWarning,
        complete ? "session snapshot complete" : "session snapshot failed",
        {{"session", name}, {"snapshot", now.number}, {"step", now.step}, {"reason", absl::string_view(now.reason)}});
  }
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The snapshots of a session: when one is due, as of which step it is taken, and what can come of it.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator_session.h"
#include "server/policy/lease.h"

namespace precondor {

absl::StatusOr<SessionSnapshot> CoordinatorSession::PlanSnapshot() {
  if (!snapshots_.empty() && snapshots_.back().state == SnapshotState::kUnderWay) {
    return absl::FailedPreconditionError(absl::StrCat("session \"", spec_.name, "\": snapshot ",
                                                      snapshots_.back().number, " as of step ", snapshots_.back().step,
                                                      " is under way"));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckRestored());
  planned_snapshot_ = Plus(granted_through_, 1);
  return NextSnapshot(*planned_snapshot_);
}

SessionSnapshot CoordinatorSession::NextSnapshot(uint64_t step) const {
  SessionSnapshot next{.number = snapshots_.empty() ? 1 : snapshots_.back().number + 1,
                       .step = step,
                       .epoch = membership_.epoch,
                       .reason = "",
                       .parts = {}};
  for (const PlacedLayers& placed : placement_) {
    if (!placed.layers.empty()) next.parts.push_back({.shard = placed.shard, .layers = placed.layers});
  }
  return next;
}

absl::StatusOr<SessionSnapshot> CoordinatorSession::PlanRestore(uint64_t step) const {
  const bool fresh = std::all_of(membership_.last_holders.begin(), membership_.last_holders.end(),
                                 [](uint64_t holder) { return holder == 0; });
  if (!fresh || !snapshots_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("session \"", spec_.name, "\": is in use already; close it before it is restored"));
  }
  SessionSnapshot planned = NextSnapshot(step);
  planned.restores = true;
  return planned;
}

absl::Status CoordinatorSession::CheckRestored() const {
  for (const SessionSnapshot& snapshot : snapshots_) {
    if (!snapshot.restores || snapshot.state == SnapshotState::kComplete) continue;
    if (snapshot.state == SnapshotState::kUnderWay) {
      return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                            absl::StrCat("session \"", spec_.name, "\": is being restored as of step ", snapshot.step));
    }
    return absl::FailedPreconditionError(absl::StrCat("session \"", spec_.name, "\": could not be restored as of step ",
                                                      snapshot.step, "; close it: ", snapshot.reason));
  }
  return absl::OkStatus();
}

void CoordinatorSession::EndSnapshotPlan() {
  planned_snapshot_.reset();
  Grant();
}

SnapshotOrder CoordinatorSession::MakeSnapshotOrder(const SessionSnapshot& snapshot, bool again) const {
  SnapshotOrder order{.session_id = id_,
                      .number = snapshot.number,
                      .step = snapshot.step,
                      .again = again,
                      .keep = {},
                      .restores = snapshot.restores};
  for (const SessionSnapshot& other : snapshots_) {
    if (other.state == SnapshotState::kComplete) order.keep.push_back(other.number);
  }
  return order;
}

std::optional<std::string> CoordinatorSession::WhyNoSnapshot(const SessionSnapshot& snapshot) const {
  if (membership_.rollback_epoch > snapshot.epoch) {
    return absl::StrCat("the job rolled back to step ", membership_.resume_step);
  }
  for (const SnapshotPart& part : snapshot.parts) {
    const auto placed = std::find_if(placement_.begin(), placement_.end(),
                                     [&](const PlacedLayers& place) { return place.shard == part.shard; });
    if (placed == placement_.end() || placed->layers != part.layers) {
      return absl::StrCat("shard ", part.shard, ": it has other layers by now");
    }
  }
  return std::nullopt;
}

bool CoordinatorSession::HasPassed(uint64_t step) const { return last_step_ >= Plus(step, lease_steps_); }

bool CoordinatorSession::WantsSnapshot(uint64_t interval_steps) const {
  if (interval_steps == 0 || !active()) return false;
  if (!snapshots_.empty() && snapshots_.back().state == SnapshotState::kUnderWay) return false;
  const uint64_t last = snapshots_.empty() ? 0 : snapshots_.back().step;
  return last_step_ > 0 && Plus(granted_through_, 1) >= Plus(last, interval_steps);
}

}  // namespace precondor

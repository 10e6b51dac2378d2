// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_snapshots.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/step_leases.h"

namespace precondor {
namespace {

// Returns the parts of a snapshot of all layers, none of them durable.
std::vector<SnapshotPart> MakeParts(absl::Span<const PlacedLayers> placement) {
  std::vector<SnapshotPart> parts;
  for (const PlacedLayers& placed : placement) {
    if (!placed.layers.empty()) parts.push_back({.shard = placed.shard, .layers = placed.layers});
  }
  return parts;
}

}  // namespace

absl::StatusOr<SnapshotEntry> SessionSnapshots::Plan(uint64_t step, uint64_t epoch,
                                                     absl::Span<const PlacedLayers> placement) const {
  if (under_way()) {
    return absl::FailedPreconditionError(absl::StrCat("session \"", session_name_, "\": snapshot ", list_.back().number,
                                                      " as of step ", list_.back().step, " is under way"));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckRestored());
  return Next(step, epoch, placement);
}

SnapshotEntry SessionSnapshots::Next(uint64_t step, uint64_t epoch, absl::Span<const PlacedLayers> placement) const {
  return {.number = list_.empty() ? 1 : list_.back().number + 1,
          .step = step,
          .epoch = epoch,
          .reason = "",
          .parts = MakeParts(placement)};
}

bool SessionSnapshots::IsUnused(const SessionMembers& members) const { return members.fresh() && list_.empty(); }

absl::StatusOr<SnapshotEntry> SessionSnapshots::PlanRestore(uint64_t step, const SessionMembers& members,
                                                            absl::Span<const PlacedLayers> placement) const {
  if (!IsUnused(members)) {
    return absl::FailedPreconditionError(
        absl::StrCat("session \"", session_name_, "\": is in use already; close it before it is restored"));
  }
  SnapshotEntry planned = Next(step, members.epoch(), placement);
  planned.restores = true;
  return planned;
}

absl::Status SessionSnapshots::CheckRestored() const {
  for (const SnapshotEntry& snapshot : list_) {
    if (!snapshot.restores || snapshot.state == SnapshotState::kComplete) continue;
    if (snapshot.state == SnapshotState::kUnderWay) {
      return ReasonedStatus(
          absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
          absl::StrCat("session \"", session_name_, "\": is being restored as of step ", snapshot.step));
    }
    return ReasonedStatus(absl::StatusCode::kDataLoss, ErrorReason::kStateLost,
                          absl::StrCat("session \"", session_name_, "\": could not be restored as of step ",
                                       snapshot.step, "; close it: ", snapshot.reason));
  }
  return absl::OkStatus();
}

std::optional<SnapshotEntry> SessionSnapshots::HeldRestored() const {
  const auto held = absl::c_find_if(list_, [](const SnapshotEntry& snapshot) {
    return snapshot.restores && snapshot.state == SnapshotState::kComplete;
  });
  return held == list_.end() ? std::nullopt : std::optional(*held);
}

SnapshotOrder SessionSnapshots::MakeOrder(uint64_t session_id, const SnapshotEntry& snapshot, bool repeated) const {
  SnapshotOrder order{.session_id = session_id,
                      .number = snapshot.number,
                      .step = snapshot.step,
                      .repeated = repeated,
                      .keep = {},
                      .restores = snapshot.restores};
  for (const SnapshotEntry& other : list_) {
    if (other.state == SnapshotState::kComplete) order.keep.push_back(other.number);
  }
  return order;
}

std::optional<std::string> SessionSnapshots::WhyNotWhole(const SnapshotEntry& snapshot, const Membership& membership) {
  if (membership.rollback_epoch > snapshot.epoch) {
    return absl::StrCat("the job rolled back to step ", membership.resume_step);
  }
  return std::nullopt;
}

bool SessionSnapshots::IsDue(uint64_t interval_steps, uint64_t step) const {
  if (interval_steps == 0 || under_way()) return false;
  const uint64_t last = list_.empty() ? 0 : list_.back().step;
  return step >= StepSum(last, interval_steps);
}

}  // namespace precondor

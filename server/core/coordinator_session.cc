// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

using absl::StatusCode;

std::string RankText(const SessionSpec& spec, uint32_t rank) {
  return absl::StrCat("session \"", spec.name, "\" rank ", rank, ": ");
}

}  // namespace

CoordinatorSession::CoordinatorSession(uint64_t id, SessionSpec spec, std::vector<ShardAssignment> shard_map,
                                       std::vector<std::vector<uint32_t>> layers_of_shard, uint64_t lease_steps)
    : id_(id),
      spec_(std::move(spec)),
      shard_map_(std::move(shard_map)),
      layers_of_shard_(std::move(layers_of_shard)),
      lease_steps_(lease_steps),
      incarnations_(spec_.world_size, 0),
      last_holders_(spec_.world_size, 0),
      granted_through_(lease_steps),
      losses_(spec_.world_size, lease_steps + 1) {}

absl::Status CoordinatorSession::CheckHolder(uint32_t rank, uint64_t incarnation) const {
  if (rank >= incarnations_.size()) {
    return ReasonedStatus(StatusCode::kNotFound, ErrorReason::kUnknownRank,
                          absl::StrCat(RankText(spec_, rank), "expected a rank below ", incarnations_.size()));
  }
  if (incarnation < last_holders_[rank]) {
    return ReasonedStatus(
        StatusCode::kFailedPrecondition, ErrorReason::kStaleIncarnation,
        absl::StrCat(RankText(spec_, rank), "held by incarnation ", last_holders_[rank], ", got ", incarnation));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> CoordinatorSession::Join(uint32_t rank, uint64_t incarnation) {
  if (incarnation == 0) {
    return ReasonedStatus(StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                          absl::StrCat(RankText(spec_, rank), "incarnation: expected anything but 0"));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(rank, incarnation));
  if (incarnations_[rank] == incarnation) return !shards_told_;
  // The first holder of a rank joins the epoch that waits for it; any later one begins a new epoch, so that what the
  // one before left behind is dropped.
  if (last_holders_[rank] != 0) BeginEpoch();
  if (incarnations_[rank] == 0) ++joined_;
  incarnations_[rank] = incarnation;
  last_holders_[rank] = incarnation;
  shards_told_ = false;
  return true;
}

void CoordinatorSession::BeginEpoch() {
  ++epoch_;
  losses_.Clear();
  last_step_ = 0;
}

void CoordinatorSession::NoteShardsTold(uint64_t epoch, uint32_t joined) {
  // Told of an older membership: the call that changed it since tells them again.
  if (epoch == epoch_ && joined == joined_) shards_told_ = true;
}

std::vector<SessionInstall> CoordinatorSession::MakeInstalls() const {
  std::vector<Member> members;
  for (uint32_t rank = 0; rank < incarnations_.size(); ++rank) {
    if (incarnations_[rank] != 0) members.push_back({.rank = rank, .incarnation = incarnations_[rank]});
  }
  std::vector<SessionInstall> installs;
  for (const std::vector<uint32_t>& layers : layers_of_shard_) {
    installs.push_back({.session_id = id_, .epoch = epoch_, .spec = spec_, .layers = layers, .members = members});
  }
  return installs;
}

absl::Status CoordinatorSession::Leave(uint32_t rank, uint64_t incarnation) {
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(rank, incarnation));
  if (incarnations_[rank] == incarnation) {
    incarnations_[rank] = 0;
    --joined_;
  } else if (incarnation != last_holders_[rank]) {
    return ReasonedStatus(StatusCode::kNotFound, ErrorReason::kUnknownRank,
                          absl::StrCat(RankText(spec_, rank), "incarnation ", incarnation, " has not joined"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<LossTable::StepLoss>> CoordinatorSession::Report(const StepReport& report) {
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(report.rank, report.incarnation));
  if (incarnations_[report.rank] != report.incarnation) {
    return ReasonedStatus(
        StatusCode::kNotFound, ErrorReason::kUnknownRank,
        absl::StrCat(RankText(spec_, report.rank), "incarnation ", report.incarnation, " has not joined"));
  }
  if (report.epoch != epoch_) {
    return ReasonedStatus(
        StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
        absl::StrCat(RankText(spec_, report.rank), "expected epoch ", epoch_, ", got ", report.epoch));
  }
  granted_through_ =
      ExtendLease({.reported_step = report.step, .granted_through = granted_through_, .lease_steps = lease_steps_})
          .lease_through_step;
  std::optional<LossTable::StepLoss> finished =
      losses_.Add(report.rank, report.step, report.loss, report.samples, report.finite);
  if (finished.has_value()) {
    last_step_ = std::max(last_step_, finished->step);
    if (finished->finite > 0) last_loss_ = finished->loss;
  }
  return finished;
}

Directive CoordinatorSession::directive() const {
  return {
      .lease_through_step = granted_through_, .modes = ModesBetween(schedule_, 0, granted_through_), .epoch = epoch_};
}

Mode CoordinatorSession::mode() const { return ModeAt(schedule_, last_step_); }

CoordinatorSessionSummary CoordinatorSession::summary() const {
  return {.session_id = id_,
          .spec = spec_,
          .epoch = epoch_,
          .joined = joined_,
          .last_step = last_step_,
          .mode = mode(),
          .loss = last_loss_,
          .shard_map = shard_map_};
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Members, steps and factors of a session. coordinator_session_snapshots.cc has its snapshots.
#include "server/core/coordinator_session.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/samples.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"

namespace precondor {
namespace {

using absl::StatusCode;

// Leases reach this many leases ahead in what is durable, so that few reports wait for the disk.
constexpr uint64_t kDurableLeases = 4;

std::string RankText(const SessionSpec& spec, uint32_t rank) {
  return absl::StrCat("session \"", spec.name, "\" rank ", rank, ": ");
}

// With the membership's epoch.
void GoBack(Membership& membership, uint64_t step) {
  membership.rollback_epoch = membership.epoch;
  membership.resume_step = step;
  // Ranks that go on do so from there.
  for (uint64_t& first_step : membership.first_steps) first_step = std::min(first_step, step);
}

}  // namespace

Membership CoordinatorSession::FirstMembership(const SessionSpec& spec) {
  const size_t ranks = static_cast<size_t>(spec.world_size);
  return {.epoch = 1,
          .rollback_epoch = 0,
          .resume_step = 0,
          .incarnations = std::vector<uint64_t>(ranks, 0),
          .first_steps = std::vector<uint64_t>(ranks, 0),
          .last_holders = std::vector<uint64_t>(ranks, 0)};
}

LeaseTerms CoordinatorSession::FirstLease(const SessionSpec& spec, uint64_t lease_steps) {
  LeaseTerms lease;
  lease.durable_through = Plus(lease_steps, lease_steps * kDurableLeases);
  // A mode that is known beforehand holds from the step that it names.
  lease.schedule = CarryOut(Decide(spec.fallback, lease.fallback), {{0, Mode::kSecondOrder}}, /*first_open_step=*/0);
  return lease;
}

CoordinatorSession::CoordinatorSession(SessionRecord record, uint64_t lease_steps)
    : id_(record.session_id),
      spec_(std::move(record.spec)),
      lease_steps_(lease_steps),
      placement_(std::move(record.placement)),
      membership_(std::move(record.membership)),
      lease_(std::move(record.lease)),
      fallback_(lease_.fallback),
      decision_(Decide(spec_.fallback, fallback_)),
      // After a restart anything up to the lease may have been granted.
      granted_through_(membership_.epoch == 1 && joined() == 0 ? lease_steps : lease_.durable_through),
      open_from_(lease_.fallback.observed ? Plus(lease_.fallback.last_step, 1) : 0),
      losses_(spec_.world_size, lease_steps + 1) {
  wanted_through_ = granted_through_;
}

uint32_t CoordinatorSession::joined() const {
  return static_cast<uint32_t>(std::count_if(membership_.incarnations.begin(), membership_.incarnations.end(),
                                             [](uint64_t x) { return x != 0; }));
}

// --- members --------------------------------------------------------------------------------------------------------

absl::Status CoordinatorSession::CheckHolder(uint32_t rank, uint64_t incarnation) const {
  if (rank >= membership_.incarnations.size()) {
    return ReasonedStatus(
        StatusCode::kNotFound, ErrorReason::kUnknownRank,
        absl::StrCat(RankText(spec_, rank), "expected a rank below ", membership_.incarnations.size()));
  }
  if (incarnation < membership_.last_holders[rank]) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStaleIncarnation,
                          absl::StrCat(RankText(spec_, rank), "held by incarnation ", membership_.last_holders[rank],
                                       ", got ", incarnation));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Membership>> CoordinatorSession::PlanJoin(uint32_t rank, uint64_t incarnation,
                                                                       uint64_t first_step) const {
  if (incarnation == 0 || incarnation > kMaxIncarnation) {
    return ReasonedStatus(
        StatusCode::kInvalidArgument, ErrorReason::kMalformed,
        absl::StrCat(RankText(spec_, rank), "incarnation: expected 1 ... ", kMaxIncarnation, ", got ", incarnation));
  }
  if (first_step > kMaxStep) {
    return ReasonedStatus(
        StatusCode::kInvalidArgument, ErrorReason::kMalformed,
        absl::StrCat(RankText(spec_, rank), "first_step: expected at most ", kMaxStep, ", got ", first_step));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(rank, incarnation));
  if (membership_.incarnations[rank] == incarnation) return std::nullopt;
  Membership next = membership_;
  // The first holder of a rank joins the epoch that waits for it; any later one begins a new epoch, so that the
  // process that held the rank before is fenced.
  if (next.last_holders[rank] != 0) ++next.epoch;
  next.first_steps[rank] = first_step;
  next.incarnations[rank] = incarnation;
  next.last_holders[rank] = incarnation;
  // Where workers have factors it needs those of its step, which the shards have let go of.
  const bool lacks =
      WorkersPrecondition(spec_) && !NeedsFactors() && ModeAt(lease_.schedule, first_step) == Mode::kSecondOrder;
  if (lacks && next.epoch != membership_.epoch) GoBack(next, first_step);
  return next;
}

absl::StatusOr<std::optional<Membership>> CoordinatorSession::PlanLeave(uint32_t rank, uint64_t incarnation) const {
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(rank, incarnation));
  if (membership_.incarnations[rank] == incarnation) {
    Membership next = membership_;
    next.incarnations[rank] = 0;
    return next;
  }
  if (incarnation == membership_.last_holders[rank]) return std::nullopt;
  return ReasonedStatus(StatusCode::kNotFound, ErrorReason::kUnknownRank,
                        absl::StrCat(RankText(spec_, rank), "incarnation ", incarnation, " has not joined"));
}

void CoordinatorSession::Adopt(Membership next) {
  const uint32_t before = joined();
  const bool new_epoch = next.epoch != membership_.epoch;
  if (next.rollback_epoch != membership_.rollback_epoch) {
    const bool needed_before = NeedsFactors();
    open_from_ = next.resume_step;
    rolled_back_ = !needed_before && NeedsFactors();
  }
  membership_ = std::move(next);
  if (new_epoch) {
    losses_.Clear();
    last_step_ = 0;
    last_finished_ = absl::InfinitePast();
  }
  // A rank that leaves is no news for shards: its frames end with it.
  if (new_epoch || joined() > before) shards_told_ = false;
}

SessionRecord CoordinatorSession::PlanMove(std::vector<PlacedLayers> placement) const {
  SessionRecord moved = record();
  moved.placement = std::move(placement);
  ++moved.membership.epoch;
  return moved;
}

void CoordinatorSession::AdoptMove(SessionRecord moved) {
  placement_ = std::move(moved.placement);
  move_in_doubt_ = false;
  Adopt(std::move(moved.membership));
}

void CoordinatorSession::WantStep(uint64_t step) {
  wanted_through_ = std::max(wanted_through_, Plus(step, lease_steps_));
  Grant();
}

Membership CoordinatorSession::PlanGoBack(uint64_t step) const {
  Membership next = membership_;
  GoBack(next, step);
  return next;
}

std::vector<Member> CoordinatorSession::Members() const {
  std::vector<Member> members;
  for (uint32_t rank = 0; rank < membership_.incarnations.size(); ++rank) {
    const uint64_t incarnation = membership_.incarnations[rank];
    if (incarnation == 0) continue;
    members.push_back({.rank = rank, .incarnation = incarnation, .first_step = membership_.first_steps[rank]});
  }
  return members;
}

EpochFence CoordinatorSession::MakeFence() const {
  return {.session_id = id_, .epoch = membership_.epoch, .members = Members()};
}

std::vector<SessionInstall> CoordinatorSession::MakeInstalls() const {
  std::optional<uint64_t> rollback_step;
  if (membership_.rollback_epoch == membership_.epoch) rollback_step = membership_.resume_step;
  std::vector<SessionInstall> installs;
  for (const PlacedLayers& placed : placement_) {
    installs.push_back({.session_id = id_,
                        .epoch = membership_.epoch,
                        .rollback_step = rollback_step,
                        .rollback_epoch = membership_.rollback_epoch,
                        .spec = spec_,
                        .layers = placed.layers,
                        .members = Members(),
                        .factors_released = !NeedsFactors()});
  }
  return installs;
}

// --- steps ----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::optional<LossTable::StepLoss>> CoordinatorSession::Report(const StepReport& report,
                                                                              absl::Time now) {
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(report.rank, report.incarnation));
  if (membership_.incarnations[report.rank] != report.incarnation) {
    return ReasonedStatus(
        StatusCode::kNotFound, ErrorReason::kUnknownRank,
        absl::StrCat(RankText(spec_, report.rank), "incarnation ", report.incarnation, " has not joined"));
  }
  if (report.epoch != membership_.epoch) {
    return ReasonedStatus(
        StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
        absl::StrCat(RankText(spec_, report.rank), "expected epoch ", membership_.epoch, ", got ", report.epoch));
  }
  if (report.step > granted_through_) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead,
                          absl::StrCat(RankText(spec_, report.rank), "expected a step of the lease, at most ",
                                       granted_through_, ", got ", report.step));
  }
  if (report.samples > kMaxSamples) {
    return ReasonedStatus(StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                          absl::StrCat(RankText(spec_, report.rank), "samples: expected at most ", kMaxSamples,
                                       ", got ", report.samples));
  }
  const LeaseDecision lease =
      ExtendLease({.reported_step = report.step, .granted_through = wanted_through_, .lease_steps = lease_steps_});
  wanted_through_ = lease.lease_through_step;
  std::optional<LossTable::StepLoss> finished =
      losses_.Add(report.rank, report.step, report.loss, report.samples, report.finite, report.learning_rate);
  if (finished.has_value()) {
    const bool next_in_line = finished->step == last_step_ + 1 && last_finished_ != absl::InfinitePast();
    fallback_ = Advance(spec_.fallback, fallback_,
                        {.step = finished->step,
                         .loss = finished->loss,
                         .learning_rate = finished->learning_rate,
                         .seconds = next_in_line ? absl::ToDoubleSeconds(now - last_finished_) : 0.0,
                         .mode = ModeAt(lease_.schedule, finished->step),
                         .skipped = finished->finite == 0});
    decision_ = Decide(spec_.fallback, fallback_);
    last_finished_ = now;
    last_step_ = std::max(last_step_, finished->step);
    open_from_ = std::max(open_from_, Plus(finished->step, 1));
    if (finished->finite > 0) last_loss_ = finished->loss;
  }
  Grant();
  return finished;
}

void CoordinatorSession::Force(std::optional<Mode> mode) {
  fallback_ = precondor::Force(spec_.fallback, fallback_, mode);
  decision_ = Decide(spec_.fallback, fallback_);
}

// While a change of mode is being written down, or may be found written after a crash, no rank may be granted a step
// that it would change.
void CoordinatorSession::Grant() {
  if (in_doubt_ || (pending_.has_value() && pending_->schedule != lease_.schedule)) return;
  uint64_t through = std::min(wanted_through_, lease_.durable_through);
  if (planned_snapshot_.has_value()) through = std::min(through, *planned_snapshot_ - 1);
  granted_through_ = std::max(granted_through_, through);
}

std::vector<ModeInterval> CoordinatorSession::WantedSchedule() const {
  const bool first_order = lease_.schedule.back().mode == Mode::kFirstOrder;
  if (first_order && decision_.mode == Mode::kSecondOrder && open_from_ < stay_until_) return lease_.schedule;
  return CarryOut(decision_, lease_.schedule, Plus(granted_through_, 1));
}

std::optional<LeaseTerms> CoordinatorSession::BeginLeaseWrite() {
  if (pending_.has_value()) return std::nullopt;
  std::vector<ModeInterval> schedule = WantedSchedule();
  const bool forced = fallback_.forced != lease_.fallback.forced;
  const bool runs_short = Plus(wanted_through_, lease_steps_) > lease_.durable_through;
  if (schedule == lease_.schedule && !runs_short && !forced && !in_doubt_) return std::nullopt;
  pending_ = LeaseTerms{
      .durable_through = std::max(lease_.durable_through, Plus(wanted_through_, kDurableLeases * lease_steps_)),
      .schedule = std::move(schedule),
      .fallback = fallback_};
  return pending_;
}

void CoordinatorSession::EndLeaseWrite(bool durable) {
  std::optional<LeaseTerms> written = std::exchange(pending_, std::nullopt);
  if (durable) {
    lease_ = *std::move(written);
    in_doubt_ = false;
  } else {
    in_doubt_ = in_doubt_ || written->schedule != lease_.schedule;
  }
  Grant();
}

// --- factors --------------------------------------------------------------------------------------------------------

bool CoordinatorSession::NoteShardsTold(const Membership& told) {
  shards_told_ = shards_told_ || told == membership_;
  return shards_told_ && std::exchange(rolled_back_, false);
}

bool CoordinatorSession::NeedsFactors() const {
  if (decision_.probe) return true;
  const std::vector<ModeInterval>& schedule = pending_.has_value() ? pending_->schedule : lease_.schedule;
  const std::vector<ModeInterval> to_come = ModesBetween(schedule, open_from_, std::numeric_limits<uint64_t>::max());
  return std::any_of(to_come.begin(), to_come.end(),
                     [](const ModeInterval& interval) { return interval.mode == Mode::kSecondOrder; });
}

FactorHold CoordinatorSession::MakeFactorHold(absl::Time now) {
  factor_version_ = std::max(factor_version_ + 1, static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixNanos(now), 1)));
  return {.session_id = id_, .version = factor_version_, .hold = NeedsFactors()};
}

bool CoordinatorSession::ReturnsToSecondOrder(const LeaseTerms& next) const {
  return lease_.schedule.back().mode == Mode::kFirstOrder && next.schedule.back().mode == Mode::kSecondOrder;
}

void CoordinatorSession::StayInFirstOrder() {
  pending_.reset();
  stay_until_ = Plus(open_from_, lease_steps_);
  Grant();
}

Directive CoordinatorSession::directive() const {
  const bool announced = !snapshots_.empty() && snapshots_.back().state != SnapshotState::kFailed &&
                         planned_snapshot_ != snapshots_.back().step;
  return {.lease_through_step = granted_through_,
          .modes = ModesBetween(lease_.schedule, 0, granted_through_),
          .epoch = membership_.epoch,
          .rollback_epoch = membership_.rollback_epoch,
          .resume_step = membership_.resume_step,
          .snapshot_at = announced ? snapshots_.back().step : 0,
          .snapshot_number = announced ? snapshots_.back().number : 0};
}

SessionRecord CoordinatorSession::record() const {
  return {.session_id = id_, .spec = spec_, .placement = placement_, .membership = membership_, .lease = lease_};
}

CoordinatorSessionSummary CoordinatorSession::summary() const {
  std::vector<ShardAssignment> shard_map;
  for (const PlacedLayers& placed : placement_) {
    if (!placed.layers.empty()) shard_map.push_back({.address = placed.address, .layers = placed.layers});
  }
  return {.session_id = id_,
          .spec = spec_,
          .epoch = membership_.epoch,
          .joined = joined(),
          .last_step = last_step_,
          .mode = mode(),
          .loss = last_loss_,
          .shard_map = std::move(shard_map),
          .decision = decision_,
          .modes = lease_.schedule,
          .forced = fallback_.forced,
          .snapshots = snapshots_};
}

}  // namespace precondor

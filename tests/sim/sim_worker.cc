// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_worker.h"

#include <utility>

#include "kernels/base/error_reason.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

// Longer than a usual round trip, so that most messages are sent once.
constexpr int64_t kTickMicros = 6000;

}  // namespace

// --- membership -----------------------------------------------------------------------------------------------------

void SimWorker::Start() {
  SendJoin();
  Tick();
}

void SimWorker::Tick() {
  // One heartbeat a worker: whatever has not been answered is sent again.
  World* world = &world_;
  world_.queue().After(kTickMicros, [world, rank = rank_, incarnation = incarnation_] {
    if (!world->Alive(rank, incarnation)) return;
    SimWorker& self = world->worker(rank);
    self.Repeat();
    self.Tick();
  });
}

void SimWorker::Repeat() {
  // Also while nothing is wrong: a rank that waits for the others would not hear otherwise that the epoch has passed.
  SendJoin();
  if (stale_ || done_) return;
  for (const auto& [which, state] : pending_) {
    if (!state.acknowledged || !state.answered) Transmit(which);
  }
  if (reporting_) return SendReport();
  FinishStepIfComplete();
}

void SimWorker::SendJoin() {
  World* world = &world_;
  world_.network().Send([world, rank = rank_, incarnation = incarnation_, first = first_step_] {
    const absl::StatusOr<JoinResult> joined =
        world->coordinator().JoinSession(world->spec().name, rank, incarnation, first);
    if (!joined.ok()) return;
    world->network().Send([world, rank, incarnation, result = *joined] {
      if (world->Alive(rank, incarnation)) world->worker(rank).OnJoined(result);
    });
  });
}

void SimWorker::OnJoined(const JoinResult& joined) {
  // Answers may overtake each other; an older epoch than the one known is of no use.
  if (!joined.active || joined.epoch < epoch_) return;
  stale_ = false;
  if (joined.epoch == epoch_) return;
  epoch_ = joined.epoch;
  session_ = joined.session_id;
  const Directive& directive = joined.directive;
  if (directive.went_back_epoch > known_epoch_) step_ = std::min(step_, directive.resume_step);
  known_epoch_ = epoch_;
  generation_ = directive.went_back_epoch;
  world_.NoteGeneration(epoch_, generation_);
  done_ = false;
  BeginStep();
}

void SimWorker::OnError(const absl::Status& status) {
  switch (GetErrorReason(status)) {
    case ErrorReason::kStaleEpoch:
    case ErrorReason::kNotActive:
      stale_ = true;
      SendJoin();
      return;
    case ErrorReason::kFutureEpoch:  // the shard will hear of it
      return;
    default:
      world_.Fail("rank " + std::to_string(rank_) + " got " + status.ToString());
  }
}

std::string SimWorker::Describe() const {
  std::string text = "rank " + std::to_string(rank_) + " incarnation " + std::to_string(incarnation_) + " epoch " +
                     std::to_string(epoch_) + " step " + std::to_string(step_) + (stale_ ? " joining" : " joined") +
                     (reporting_ ? " reporting" : "") + (done_ ? " done" : "");
  for (const auto& [which, state] : pending_) {
    if (state.acknowledged && state.answered) continue;
    text += which.first == ContributionKind::kGradient ? " gradient " : " statistics ";
    text += std::to_string(which.second) + (state.acknowledged ? " unanswered" : " unacknowledged");
  }
  return text;
}

// --- steps ----------------------------------------------------------------------------------------------------------

void SimWorker::BeginStep() {
  pending_.clear();
  reporting_ = false;
  if (step_ >= world_.scenario().steps) {
    done_ = true;
    return;
  }
  const SessionSpec& spec = world_.spec();
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    if (IsStatisticStep(spec, step_)) pending_[{ContributionKind::kStatistics, layer}] = {};
    if (spec.exchange == ExchangeMode::kDirect || DelegateRank(spec, layer) == static_cast<int32_t>(rank_)) {
      pending_[{ContributionKind::kGradient, layer}] = {};
    }
  }
  for (const auto& [which, state] : pending_) Transmit(which);
  FinishStepIfComplete();
}

void SimWorker::Transmit(PendingKey which) {
  const auto [kind, layer] = which;
  // The job's all-reduce ends when every rank has come to the step.
  const bool reduced = world_.spec().exchange == ExchangeMode::kDelegate;
  if (kind == ContributionKind::kGradient && reduced && !world_.AllReached(generation_, step_)) return;
  const Part part = world_.oracle().PartOf(kind, step_, layer, rank_);
  ContributionHeader header;
  header.key = {.session_id = session_,
                .epoch = epoch_,
                .step = step_,
                .layer = layer,
                .rank = rank_,
                .incarnation = incarnation_};
  header.kind = kind;
  header.samples = part.samples;
  header.abstain = part.abstain;
  const LayerSpec& shape = world_.spec().layers[layer];
  const int64_t q = VectorsPerWorker(world_.spec());
  if (!part.abstain && kind == ContributionKind::kGradient) {
    header.tensors = {{.dtype = DType::kF32, .dims = {shape.d_out, shape.d_in}, .scale = 1}};
  } else if (!part.abstain) {
    header.tensors = {{.dtype = DType::kF32, .dims = {q, shape.d_in}, .scale = 1},
                      {.dtype = DType::kF32, .dims = {q, shape.d_out}, .scale = 1}};
  }
  World* world = &world_;
  world_.network().Send([world, header, part, which = which] {
    const ContributionKey key = header.key;
    const auto back = [world, key](auto handler) {
      world->network().Send([world, key, handler] {
        if (world->Alive(key.rank, key.incarnation)) handler(world->worker(key.rank));
      });
    };
    world->Deliver(
        header, part,
        [=](absl::StatusOr<bool> ack) { back([=](SimWorker& self) { self.OnAck(key.epoch, key.step, which, ack); }); },
        [=](absl::StatusOr<GradientResult> result) {
          back([=](SimWorker& self) { self.OnResult(key.epoch, key.step, which, result); });
        });
  });
}

void SimWorker::OnAck(uint64_t epoch, uint64_t step, PendingKey which, const absl::StatusOr<bool>& ack) {
  if (stale_ || epoch != epoch_ || step != step_ || done_) return;
  Pending& state = pending_[which];
  const ErrorReason reason = GetErrorReason(ack.status());
  // A repetition whose acknowledgement was lost may come when its step is over.
  const bool late = reason == ErrorReason::kStaleStep && which.first == ContributionKind::kStatistics;
  if (!ack.ok() && reason != ErrorReason::kNonFinite && !late) return OnError(ack.status());
  state.acknowledged = true;
  // Refused statistics are done with; a refused gradient is asked for again, to hear that the step is skipped.
  if (which.first == ContributionKind::kStatistics) state.answered = true;
  FinishStepIfComplete();
}

void SimWorker::OnResult(uint64_t epoch, uint64_t step, PendingKey which,
                         const absl::StatusOr<GradientResult>& result) {
  if (stale_ || epoch != epoch_ || step != step_ || done_) return;
  if (!result.ok()) return OnError(result.status());
  pending_[which].acknowledged = true;
  pending_[which].answered = true;
  FinishStepIfComplete();
}

void SimWorker::FinishStepIfComplete() {
  for (const auto& [which, state] : pending_) {
    if (!state.acknowledged || !state.answered) return;
  }
  if (done_ || reporting_ || !world_.AllAnswered(generation_, step_)) return;
  reporting_ = true;
  SendReport();
}

void SimWorker::SendReport() {
  World* world = &world_;
  const StepReport report{
      .session_id = session_, .epoch = epoch_, .rank = rank_, .incarnation = incarnation_, .step = step_, .loss = 1.0};
  world_.network().Send([world, report] {
    const absl::StatusOr<Directive> directive = world->coordinator().ReportStep(report);
    world->network().Send([world, report, directive] {
      if (!world->Alive(report.rank, report.incarnation)) return;
      SimWorker& self = world->worker(report.rank);
      if (self.stale_ || self.epoch_ != report.epoch || self.step_ != report.step || self.done_) return;
      if (!directive.ok()) return self.OnError(directive.status());
      if (directive->lease_through_step < self.step_ + 1) world->Fail("the lease ends before the next step");
      ++self.step_;
      self.BeginStep();
    });
  });
}

}  // namespace precondor::sim

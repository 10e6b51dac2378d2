// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_worker.h"

#include <algorithm>
#include <utility>

#include "kernels/base/error_reason.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

// Longer than a usual round trip, so that most messages are sent once.
constexpr int64_t kTickMicros = 6000;

// Falls for a while, then stands still: policies that look at it have something to decide.
double LossOf(uint64_t step) { return step < 5 ? 10.0 - static_cast<double>(step) : 5.0; }

}  // namespace

SimWorker::SimWorker(World& world, Process& process, Checkpoints& checkpoints, uint32_t rank, uint64_t incarnation)
    : world_(world),
      process_(process),
      checkpoints_(checkpoints),
      rank_(rank),
      incarnation_(incarnation),
      first_step_(checkpoints.last_step()),
      step_(first_step_) {}

void SimWorker::Start() {
  SendJoin();
  Tick();
}

void SimWorker::Tick() {
  // One heartbeat a worker: whatever has not been answered is sent again.
  process_.After(kTickMicros, [this] {
    Tick();
    // Also while nothing is wrong: a rank that waits for the others would not hear otherwise that the epoch has passed.
    SendJoin();
    if (stale_) return;
    AskForLives();
    for (const Sent& sent : again_) Transmit(sent);
    if (!owed_.empty()) SendReport();
    for (const auto& [which, state] : pending_) {
      if (!state.acknowledged || !state.answered) Transmit({step_, mode_, which});
    }
    if (!begun_ && !done_ && (owed_.empty() || world_.random().Chance(world_.scenario().impatience))) BeginStep();
    FinishStepIfComplete();
  });
}

std::string SimWorker::Describe() const {
  std::string text = process_.name() + " incarnation " + std::to_string(incarnation_) + " epoch " +
                     std::to_string(epoch_) + " step " + std::to_string(step_) + (stale_ ? " joining" : "") +
                     (begun_ ? "" : " not begun, lease " + std::to_string(lease_)) +
                     (owed_.empty() ? "" : " reporting") + (done_ ? " done" : "");
  for (const auto& [which, state] : pending_) {
    if (state.acknowledged && state.answered) continue;
    text += which.first == ContributionKind::kGradient ? " gradient " : " statistics ";
    text += std::to_string(which.second) + (state.acknowledged ? " unanswered" : " unacknowledged");
  }
  return text;
}

// --- membership -----------------------------------------------------------------------------------------------------

void SimWorker::SendJoin() {
  Process& coordinator = world_.coordinator().process();
  world_.network().Send(process_, coordinator,
                        [this, world = &world_, rank = rank_, incarnation = incarnation_, first = first_step_,
                         process = &process_, life = process_.life()] {
                          const absl::StatusOr<JoinResult> joined =
                              world->coordinator().core().JoinSession(world->spec().name, rank, incarnation, first);
                          if (!joined.ok()) return;
                          // Not to a later process of the rank.
                          world->network().Send(world->coordinator().process(), *process,
                                                [this, process, life, result = *joined] {
                                                  if (process->life() == life) OnJoined(result);
                                                });
                        });
}

void SimWorker::OnJoined(const JoinResult& joined) {
  // Answers may overtake each other; an older epoch than the one known is of no use.
  if (!joined.active || joined.epoch < epoch_) return;
  stale_ = false;
  Adopt(joined.directive);
  if (joined.epoch == epoch_) return;
  const uint64_t known = std::max(epoch_, checkpoints_.epoch());
  epoch_ = joined.epoch;
  session_ = joined.session_id;
  generation_ = joined.directive.went_back_epoch;
  if (generation_ > known && joined.directive.resume_step < step_) GoBack(joined.directive.resume_step);
  done_ = false;
  begun_ = false;
  BeginStep();
}

void SimWorker::GoBack(uint64_t step) {
  world_.trace().Note([&] { return process_.name() + " goes back to step " + std::to_string(step); });
  step_ = step;
  owed_.clear();
  kept_.clear();
  again_.clear();
  checkpoints_.GoBackTo(step);
}

void SimWorker::Adopt(const Directive& directive) {
  if (directive.lease_through_step < lease_) return;
  lease_ = directive.lease_through_step;
  modes_ = directive.modes;
}

void SimWorker::OnError(const absl::Status& status) {
  switch (GetErrorReason(status)) {
    case ErrorReason::kStaleEpoch:
      stale_ = true;
      SendJoin();
      return;
    case ErrorReason::kNotActive:
    case ErrorReason::kFutureEpoch:
      return;  // tried again with the next heartbeat
    default:
      if (status.code() == absl::StatusCode::kUnavailable) return;
      // A shard whose machine crashed may know less than it had told, down to the session itself.
      if (world_.job().inexact()) return;
      world_.Fail("I7: " + process_.name() + " got " + status.ToString());
  }
}

// --- steps ----------------------------------------------------------------------------------------------------------

void SimWorker::BeginStep() {
  pending_.clear();
  if (step_ >= world_.scenario().steps) {
    done_ = true;
    return;
  }
  if (step_ > lease_) return;
  begun_ = true;
  mode_ = ModeAt(modes_, step_);
  const uint64_t weights = checkpoints_.weights(step_);
  checkpoints_.Write(step_, weights, epoch_);
  world_.trace().Note([&] {
    return process_.name() + " begins step " + std::to_string(step_) + " in " + std::string(ModeName(mode_));
  });
  world_.Fail(world_.NoteMode(step_, mode_));
  world_.Fail(world_.job().NoteWeights(generation_, step_, weights));
  const SessionSpec& spec = world_.spec();
  const bool direct = spec.exchange == ExchangeMode::kDirect;
  const bool second = mode_ == Mode::kSecondOrder;
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    if (second && IsStatisticStep(spec, step_)) pending_[{ContributionKind::kStatistics, layer}] = {};
    const bool sends = direct || (second && DelegateRank(spec, layer) == static_cast<int32_t>(rank_));
    if (sends) pending_[{ContributionKind::kGradient, layer}] = {};
  }
  for (const auto& [which, state] : pending_) Transmit({step_, mode_, which});
  FinishStepIfComplete();
}

ContributionHeader SimWorker::HeaderOf(const Sent& sent, const Part& part) const {
  const auto [kind, layer] = sent.which;
  ContributionHeader header;
  header.key = {.session_id = session_,
                .epoch = epoch_,
                .step = sent.step,
                .layer = layer,
                .rank = rank_,
                .incarnation = incarnation_};
  header.kind = kind;
  header.mode = sent.mode;
  header.samples = part.samples;
  header.abstain = part.abstain;
  if (part.abstain) return header;
  const LayerSpec& shape = world_.spec().layers[layer];
  const int64_t q = VectorsPerWorker(world_.spec());
  if (kind == ContributionKind::kGradient) {
    header.tensors = {{.dtype = DType::kF32, .dims = {shape.d_out, shape.d_in}, .scale = 1}};
  } else {
    header.tensors = {{.dtype = DType::kF32, .dims = {q, shape.d_in}, .scale = 1},
                      {.dtype = DType::kF32, .dims = {q, shape.d_out}, .scale = 1}};
  }
  return header;
}

void SimWorker::Transmit(const Sent& sent) {
  const auto [kind, layer] = sent.which;
  // The job's all-reduce ends when every rank has come to the step.
  const bool reduced = world_.spec().exchange == ExchangeMode::kDelegate;
  if (kind == ContributionKind::kGradient && reduced && !world_.AllReached(generation_, sent.step)) return;
  const Part part = world_.oracle().PartOf(kind, sent.step, layer, rank_, incarnation_);
  SimShard& shard = world_.ShardOf(layer);
  world_.network().Send(
      process_, shard.process(),
      [this, shard = &shard, world = &world_, process = &process_, life = process_.life(),
       header = HeaderOf(sent, part), part, sent] {
        const auto back = [=](auto handler) {
          world->network().Send(shard->process(), *process, [=] {
            if (process->life() == life) handler();
          });
        };
        const uint64_t of_shard = shard->process().life();
        shard->Deliver(
            header, part,
            [=, this](const absl::StatusOr<bool>& ack) { back([=, this] { OnAck(header.key, sent, of_shard, ack); }); },
            [=, this](const absl::StatusOr<GradientResult>& result) {
              back([=, this] { OnResult(header.key, sent.which, of_shard, result); });
            });
      });
}

// --- shards that come back ------------------------------------------------------------------------------------------

void SimWorker::AskForLives() {
  for (uint32_t layer = 0; layer < world_.spec().layers.size(); ++layer) {
    Process& shard = world_.ShardOf(layer).process();
    world_.network().Send(
        process_, shard, [this, layer, shard = &shard, world = &world_, process = &process_, life = process_.life()] {
          world->network().Send(*shard, *process, [this, layer, process, life, of_shard = shard->life()] {
            if (process->life() == life) OnLife(layer, of_shard);
          });
        });
  }
}

void SimWorker::OnLife(uint32_t layer, uint64_t life) {
  uint64_t& known = lives_[layer];
  if (life <= known) return;
  const bool lost = known != 0;
  known = life;
  if (!lost) return;
  for (const Sent& sent : kept_) {
    if (sent.which.second == layer) again_.insert(sent);
  }
  for (auto& [which, state] : pending_) {
    if (which.second != layer) continue;
    // An answer stays an answer; others may lack it.
    state.acknowledged = false;
    if (which.first == ContributionKind::kStatistics) state.answered = false;
  }
  for (const Sent& sent : again_) Transmit(sent);
}

void SimWorker::KeepStep() {
  const bool direct = world_.spec().exchange == ExchangeMode::kDirect;
  // In DIRECT all ranks have the answers of the step before this one: they have sent gradients of this one.
  std::set<uint64_t> steps;
  for (const Sent& sent : kept_) steps.insert(sent.step);
  const size_t count = direct ? 0 : 3;
  while (steps.size() > count) steps.erase(steps.begin());
  std::erase_if(kept_, [&](const Sent& sent) { return !steps.contains(sent.step); });
  std::erase_if(again_, [&](const Sent& sent) { return !kept_.contains(sent); });
  for (const auto& [which, state] : pending_) {
    if (direct || which.first == ContributionKind::kStatistics) kept_.insert({step_, mode_, which});
  }
}

void SimWorker::OnAckOfKept(const Sent& sent, const absl::Status& ack) {
  // What the shard had not forgotten, or will not take, is not needed.
  const bool later = ack.code() == absl::StatusCode::kUnavailable || GetErrorReason(ack) == ErrorReason::kStaleEpoch;
  if (!later) again_.erase(sent);
}

bool SimWorker::Current(const ContributionKey& key) const {
  return !stale_ && begun_ && key.epoch == epoch_ && key.step == step_;
}

void SimWorker::OnAck(const ContributionKey& key, const Sent& sent, uint64_t life, const absl::StatusOr<bool>& ack) {
  OnLife(sent.which.second, life);
  // What a shard said that has been lost since is worth nothing.
  if (life < lives_[sent.which.second]) return;
  if (again_.contains(sent)) OnAckOfKept(sent, ack.status());
  if (!Current(key)) return;
  const PendingKey which = sent.which;
  Pending& state = pending_[which];
  const bool statistics = which.first == ContributionKind::kStatistics;
  const ErrorReason reason = GetErrorReason(ack.status());
  // A repetition whose acknowledgement was lost may come when its step is over; or the step was sealed without it.
  const bool late = reason == ErrorReason::kStaleStep && statistics;
  if (!ack.ok() && reason != ErrorReason::kNonFinite && !late) return OnError(ack.status());
  state.acknowledged = true;
  // Refused statistics are done with; a refused gradient is asked for again, to hear that the step is skipped.
  if (statistics) state.answered = true;
  FinishStepIfComplete();
}

void SimWorker::OnResult(const ContributionKey& key, PendingKey which, uint64_t life,
                         const absl::StatusOr<GradientResult>& result) {
  OnLife(which.second, life);
  if (!Current(key)) return;
  if (!result.ok()) return OnError(result.status());
  world_.Fail(world_.job().NoteAnswer(generation_, step_, which.second, DigestOf(*result)));
  Pending& state = pending_[which];
  state.answered = true;
  // An answer is good whoever gave it; that a shard which has been lost since had the gradient helps nobody now.
  if (life >= lives_[which.second]) state.acknowledged = true;
  FinishStepIfComplete();
}

void SimWorker::FinishStepIfComplete() {
  if (!begun_) return;
  for (const auto& [which, state] : pending_) {
    if (!state.acknowledged || !state.answered) return;
  }
  const SessionSpec& spec = world_.spec();
  uint64_t weights = checkpoints_.weights(step_);
  const bool alone = mode_ == Mode::kFirstOrder && spec.exchange == ExchangeMode::kDelegate;
  // Without the service: the job's own all-reduce.
  if (alone && !world_.AllReached(generation_, step_)) return;
  if (alone) weights = Mix(weights);
  for (uint32_t layer = 0; layer < spec.layers.size() && !alone; ++layer) {
    const uint64_t answer = world_.job().AnswerOf(generation_, step_, layer);
    if (answer == 0) return;
    weights = Mix(weights ^ answer);
  }
  owed_.push_back(step_);
  KeepStep();
  pending_.clear();
  begun_ = false;
  ++step_;
  checkpoints_.Write(step_, weights, epoch_);
  SendReport();
}

void SimWorker::SendReport() {
  Process& coordinator = world_.coordinator().process();
  const StepReport report{.session_id = session_,
                          .epoch = epoch_,
                          .rank = rank_,
                          .incarnation = incarnation_,
                          .step = owed_.front(),
                          .loss = LossOf(owed_.front())};
  world_.network().Send(
      process_, coordinator, [this, report, world = &world_, process = &process_, life = process_.life()] {
        const absl::StatusOr<Directive> directive = world->coordinator().core().ReportStep(report);
        world->network().Send(world->coordinator().process(), *process, [this, report, directive, process, life] {
          if (process->life() == life) OnReported(report.epoch, report.step, directive);
        });
      });
}

void SimWorker::OnReported(uint64_t epoch, uint64_t step, const absl::StatusOr<Directive>& directive) {
  if (stale_ || epoch != epoch_ || owed_.empty() || owed_.front() != step) return;
  if (!directive.ok()) return OnError(directive.status());
  Adopt(*directive);
  // A coordinator that cannot promise more yet, its disk may be full, is asked again.
  if (owed_.size() == 1 && lease_ <= step) return;
  owed_.pop_front();
  if (!owed_.empty()) return SendReport();
  if (!begun_) BeginStep();
}

}  // namespace precondor::sim

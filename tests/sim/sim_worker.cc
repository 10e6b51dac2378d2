// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_worker.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/cpp/src/result_state.h"
#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/sim/encode.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

constexpr int64_t kWorkerTickMicros = 6000;

// Falls for a while, then stands still: policies that look at it have something to decide.
double LossOf(uint64_t step) { return step < 5 ? 10.0 - static_cast<double>(step) : 5.0; }

}  // namespace

SimWorker::SimWorker(World& world, Process& process, Checkpoints& checkpoints, uint32_t rank, uint64_t incarnation)
    : world_(world),
      process_(process),
      checkpoints_(checkpoints),
      versions_(checkpoints.versions(checkpoints.last_step())),
      rank_(rank),
      incarnation_(incarnation),
      step_(checkpoints.last_step()),
      ledger_(step_, {}) {}

WorkerDirective SimWorker::DirectiveOf(const Directive& directive) const {
  WorkerDirective out;
  out.lease_through_step = directive.lease_through_step;
  for (const ModeInterval& interval : directive.modes) out.modes.emplace_back(interval.first_step, interval.mode);
  if (world_.scenario().bug == PlantedBug::kLease && rank_ > 0 && out.modes.size() > 1) --out.modes.back().first;
  out.rollback_epoch = directive.rollback_epoch;
  out.resume_step = directive.resume_step;
  out.snapshot_at = directive.snapshot_at;
  out.snapshot_id = directive.snapshot_number;
  return out;
}

void SimWorker::Start() {
  SendJoin();
  Tick();
}

void SimWorker::Tick() {
  process_.After(kWorkerTickMicros, [this] {
    Tick();
    // Also while nothing is wrong: a rank that waits for the others would not hear otherwise that the epoch has passed.
    SendJoin();
    if (epoch_ == 0) return;
    for (const auto& [address, link] : links_) link->Tick();
    if (ledger_.owes()) SendReport();
    if (begun_) SubmitGradients();
    if (!begun_ && !finished_ && (!ledger_.owes() || world_.random().Chance(world_.scenario().impatience))) BeginStep();
    FinishStepIfComplete();
  });
}

bool SimWorker::Flushed() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& link) { return link.second->unacknowledged() == 0; });
}

std::string SimWorker::Describe() const {
  std::string text = process_.name() + " incarnation " + std::to_string(incarnation_) + " epoch " +
                     std::to_string(epoch_) + " step " + std::to_string(step_) +
                     (begun_ ? "" : " not begun, lease " + std::to_string(ledger_.directive().lease_through_step)) +
                     (ledger_.owes() ? " reporting" : "") + (finished_ ? " finished" : "");
  for (const auto& [address, link] : links_) text += link->Describe();
  return text;
}

// --- membership -----------------------------------------------------------------------------------------------------

void SimWorker::SendJoin() {
  Process& coordinator = world_.coordinator().process();
  world_.network().Send(process_, coordinator,
                        [this, world = &world_, rank = rank_, incarnation = incarnation_, next = ledger_.next_step(),
                         process = &process_, life = process_.life()] {
                          const absl::StatusOr<JoinResult> joined =
                              world->coordinator().core().JoinSession(world->spec().name, rank, incarnation, next);
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
  const WorkerDirective directive = DirectiveOf(joined.directive);
  if (joined.epoch == epoch_) return ledger_.Adopt(directive);
  const uint64_t known = std::max(epoch_, checkpoints_.epoch());
  const bool first = epoch_ == 0;
  // It has said that it begins with a step that is history: it has to say otherwise, which takes another incarnation.
  if (first && directive.LeavesBehind(known, step_)) {
    return world_.RestartRank(rank_, step_ - directive.resume_step, /*down_us=*/0);
  }
  epoch_ = joined.epoch;
  session_ = joined.session_id;
  // Answers of a step that it has not finished bind it just so.
  uint64_t next_step = step_;
  for (const auto& [address, link] : links_) {
    if (const std::optional<uint64_t> step = link->answered_through()) next_step = std::max(next_step, *step + 1);
  }
  if (directive.LeavesBehind(known, next_step)) GoBack(directive);
  ledger_.Adopt(directive);
  EnterGeneration();
  ChangeEpoch(joined.shard_map);
  if (factors_ == nullptr && WorkersPrecondition(world_.spec())) MakeFactors();
  if (first || finished_) BeginStep();
}

// A rank that has yet to finish a step before that of a rollback finishes it as the others have.
void SimWorker::EnterGeneration() {
  if (step_ >= ledger_.directive().resume_step) generation_ = ledger_.directive().rollback_epoch;
}

// The trainer is told so, goes back, and joins with a worker that knows nothing.
void SimWorker::GoBack(const WorkerDirective& directive) {
  step_ = directive.resume_step;
  world_.trace().Note([&] { return process_.name() + " goes back to step " + std::to_string(step_); });
  factors_.reset();
  links_.clear();
  of_layer_.clear();
  asked_.clear();
  begun_ = finished_ = false;
  ledger_ = StepLedger(step_, directive);
  checkpoints_.GoBackTo(step_);
  versions_ = checkpoints_.versions(step_);
}

void SimWorker::ChangeEpoch(const std::vector<ShardAssignment>& shard_map) {
  for (const auto& [address, link] : links_) link->ChangeEpoch(epoch_);
  if (!links_.empty()) return;
  of_layer_.resize(world_.spec().layers.size());
  for (const ShardAssignment& assignment : shard_map) {
    if (assignment.layers.empty()) continue;
    std::unique_ptr<SimLink>& link = links_[assignment.address];
    link = MakeLink(world_.ShardAt(assignment.address));
    for (const uint32_t layer : assignment.layers) of_layer_[layer] = link.get();
  }
  if (step_ == 0 || WorkersPrecondition(world_.spec())) return;
  versions_.resize(of_layer_.size());
  for (uint32_t layer = 0; layer < of_layer_.size(); ++layer) of_layer_[layer]->BeginAt(layer, step_, versions_[layer]);
}

std::unique_ptr<SimLink> SimWorker::MakeLink(SimShard& shard) {
  const SessionSpec& spec = world_.spec();
  SimLink::Options options{.session_id = session_, .epoch = epoch_, .rank = rank_, .incarnation = incarnation_};
  options.keep_gradients = spec.exchange != ExchangeMode::kDelegate && spec.world_size > 1;
  SimLink::Hooks hooks;
  hooks.answered = [this](uint32_t layer, const GradientResult& result) { OnAnswer(layer, result); };
  hooks.handed = [this] { WorkOnFactors(); };
  if (!WorkersPrecondition(spec)) {
    hooks.last_first_order = [this] { return ledger_.directive().LastFirstOrder(ledger_.next_step()); };
  }
  hooks.stale_epoch = [this](uint64_t epoch) {
    if (epoch == epoch_) SendJoin();
  };
  hooks.failed = [this](const absl::Status& status) { OnError(status); };
  return std::make_unique<SimLink>(world_, process_, shard, options, std::move(hooks));
}

void SimWorker::OnError(const absl::Status& status) {
  // The others could get another answer than this rank has had; its trainer begins again, or gives up.
  const bool shared = world_.spec().exchange != ExchangeMode::kDelegate;
  const ErrorReason reason = GetErrorReason(status);
  if (reason == ErrorReason::kStateLost && world_.job().inexact() && shared) return world_.LoseJob();
  // Another rank has begun after the step, and cannot repeat what the shard lost with it.
  const bool met = world_.scenario().meets || world_.has_begun_again();
  if (reason == ErrorReason::kStaleStep && met) return world_.LoseJob();
  world_.Fail("I7: " + process_.name() + " got " + status.ToString());
}

// --- steps ----------------------------------------------------------------------------------------------------------

void SimWorker::BeginStep() {
  if (step_ >= world_.scenario().steps) {
    finished_ = true;
    return;
  }
  if (!ledger_.MayStart(step_)) return;
  EnterGeneration();
  begun_ = true;
  mode_ = ledger_.directive().ModeOf(step_);
  const uint64_t weights = checkpoints_.weights(step_);
  checkpoints_.Write(step_, weights, versions_, epoch_);
  world_.trace().Note([&] {
    return process_.name() + " begins step " + std::to_string(step_) + " in " + std::string(ModeName(mode_));
  });
  world_.Fail(world_.NoteMode(step_, mode_));
  world_.Fail(world_.job().NoteWeights(generation_, step_, weights));
  const SessionSpec& spec = world_.spec();
  const bool direct = spec.exchange == ExchangeMode::kDirect;
  const bool second = mode_ == Mode::kSecondOrder;
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    if (second && IsStatisticStep(spec, step_) && !world_.scenario().learns) SubmitStatistics(layer);
    const bool asks = factors_ != nullptr || spec.exchange == ExchangeMode::kSharded ||
                      DelegateRank(spec, layer) == static_cast<int32_t>(rank_);
    if (direct || (second && asks)) asked_[layer] = {};
  }
  SubmitGradients();
  FinishStepIfComplete();
}

void SimWorker::SubmitGradients() {
  // The job's all-reduce ends when every rank has come to the step.
  const bool reduced = world_.spec().exchange != ExchangeMode::kDirect;
  if (reduced && !world_.AllReached(generation_, step_)) return;
  for (auto& [layer, asked] : asked_) {
    if (factors_ != nullptr) {
      if (asked.local == nullptr) asked.local = Precondition(layer);
    } else if (asked.memory == nullptr) {
      asked.memory = Submit(v1::FRAME_KIND_GRADIENT, layer);
    }
  }
  if (factors_ != nullptr) WorkOnFactors();
}

// As WorkerImpl::SubmitStatistics does.
void SimWorker::SubmitStatistics(uint32_t layer) {
  std::shared_ptr<AnswerSink> update;
  if (factors_ != nullptr) {
    factors_->Need(layer);
    update = factors_->ExpectUpdate(layer, step_);
    PRECONDOR_CHECK(update != nullptr);
  }
  (void)Submit(v1::FRAME_KIND_STATISTICS, layer);
  if (update != nullptr) SendRequest(v1::FRAME_KIND_PULL, step_, layer, std::move(update));
}

void SimWorker::SendRequest(v1::FrameKind kind, uint64_t step, uint32_t layer, std::shared_ptr<AnswerSink> sink) {
  auto request = std::make_shared<Contribution>();
  request->id = {kind, step, layer};
  request->result = std::move(sink);
  of_layer_[layer]->Submit(std::move(request));
}

// --- factors --------------------------------------------------------------------------------------------------------

void SimWorker::MakeFactors() {
  const auto check = [this](const std::string& layer, const MethodState& state) {
    world_.trace().Note([&] { return process_.name() + " has " + layer + " at " + std::to_string(state.version); });
    if (state.version == 0 || world_.job().inexact() || world_.KnowsState(layer, state)) return;
    world_.Fail("I2: " + process_.name() + " has factors that no shard ever had");
  };
  events_.updated = [check](const std::string& layer, const Stacked&, const MethodState& after) {
    check(layer, after);
  };
  events_.made = [](const std::string&) {};
  events_.loaded = check;
  absl::StatusOr<MethodSet> methods =
      MethodSet::Make(world_.spec(), [this](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
        return std::make_unique<SimMethod>(events_, /*learns=*/false);
      });
  PRECONDOR_CHECK(methods.ok());
  factors_ = LocalFactors::MakeWith(world_.spec(), *std::move(methods), *MakeCpuBackend({}), /*threads=*/0,
                                    process_.name(), [this](int64_t layer, const std::shared_ptr<AnswerSink>& sink) {
                                      SendRequest(v1::FRAME_KIND_FETCH, ledger_.next_step(),
                                                  static_cast<uint32_t>(layer), sink);
                                    });
  for (uint32_t layer = 0; layer < world_.spec().layers.size(); ++layer) {
    factors_->Need(layer);
  }
}

std::shared_ptr<SimWorker::Local> SimWorker::Precondition(uint32_t layer) {
  auto local = std::make_shared<Local>();
  // The average is the same on every rank.
  local->gradient = world_.oracle().PartOf(ContributionKind::kGradient, step_, layer, 0, 0).values;
  for (float& value : local->gradient) value = std::isnan(value) ? 1.0f : value;
  local->out.resize(local->gradient.size());
  const LayerSpec& shape = world_.spec().layers[layer];
  const MatrixView out(local->out.data(), shape.d_out, shape.d_in);
  local->state = std::make_shared<PreconditionFuture::State>(process_.name(), out, false, false);
  factors_->Precondition(step_, layer, ConstMatrixView(local->gradient.data(), shape.d_out, shape.d_in), out,
                         local->state);
  return local;
}

void SimWorker::WorkOnFactors() {
  work_again_ = true;
  if (std::exchange(working_, true)) return;
  while (std::exchange(work_again_, false)) {
    while (factors_ != nullptr && factors_->Work()) {
    }
    for (auto& [index, asked] : asked_) {
      const uint32_t layer = index;
      if (asked.local == nullptr || asked.answer.has_value() || !asked.local->state->ready()) continue;
      const absl::StatusOr<Preconditioned> outcome = asked.local->state->Wait();
      if (!outcome.ok()) {
        OnError(outcome.status());
        continue;
      }
      GradientResult answer;
      answer.decision = outcome->decision;
      answer.bytes = std::make_shared<const Payload>(Encode(asked.local->out));
      asked.answer = DigestOf(answer);
      world_.trace().Note([&] {
        return process_.name() + " preconditions layer " + std::to_string(layer) + " at " +
               std::to_string(outcome->factor_version);
      });
      world_.Fail(world_.job().NoteAnswer(generation_, step_, layer, *asked.answer));
    }
    FinishStepIfComplete();
  }
  working_ = false;
}

// --- contributions --------------------------------------------------------------------------------------------------

std::shared_ptr<Payload> SimWorker::Submit(v1::FrameKind kind, uint32_t layer) {
  const bool gradient = kind == v1::FRAME_KIND_GRADIENT;
  const Part part = world_.oracle().PartOf(gradient ? ContributionKind::kGradient : ContributionKind::kStatistics,
                                           step_, layer, rank_, incarnation_);
  auto item = std::make_shared<Contribution>();
  item->id = {kind, step_, layer};
  item->mode = mode_;
  item->samples = part.samples;
  item->abstain = part.abstain;
  const auto memory = std::make_shared<Payload>(part.abstain ? Payload() : Encode(part.values));
  item->payload = *memory;
  item->payload_owner = memory;
  item->borrowed = gradient;
  if (gradient && world_.spec().exchange == ExchangeMode::kSharded) {
    // Each rank gets the whole answer, so that all can be compared.
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(world_.spec().world_size); ++rank) {
      const auto [begin, end] = OwnRows(world_.spec(), layer, rank);
      if (begin == end) continue;
      item->parts.push_back(
          {.row = begin, .rows = end - begin, .cols = world_.spec().layers[layer].d_in, .sent = rank == rank_});
    }
  }
  if (gradient) {
    item->result = std::make_shared<PreconditionFuture::State>(process_.name(), MatrixView(), false, false);
  }
  of_layer_[layer]->Submit(std::move(item));
  return memory;
}

void SimWorker::OnAnswer(uint32_t layer, const GradientResult& result) {
  Asked& asked = asked_.at(layer);
  // The trainer has its memory back, and uses it for something else.
  std::fill(asked.memory->begin(), asked.memory->end(), uint8_t{0xa5});
  asked.answer = DigestOf(result);
  versions_.resize(of_layer_.size());
  versions_[layer] = mode_ == Mode::kSecondOrder ? result.factor_version : 0;
  world_.Fail(world_.job().NoteAnswer(generation_, step_, layer, *asked.answer));
  FinishStepIfComplete();
}

void SimWorker::FinishStepIfComplete() {
  if (!begun_) return;
  for (const auto& [layer, asked] : asked_) {
    if (!asked.answer.has_value()) return;
  }
  const SessionSpec& spec = world_.spec();
  uint64_t weights = checkpoints_.weights(step_);
  const bool alone = mode_ == Mode::kFirstOrder && spec.exchange != ExchangeMode::kDirect;
  // Without the service: the job's own all-reduce.
  if (alone && !world_.AllReached(generation_, step_)) return;
  if (alone) weights = Mix(weights);
  if (alone) versions_.assign(versions_.size(), 0);
  for (uint32_t layer = 0; layer < spec.layers.size() && !alone; ++layer) {
    const uint64_t answer = world_.job().AnswerOf(generation_, step_, layer);
    if (answer == 0) return;
    weights = Mix(weights ^ answer);
  }
  // All that a checkpoint follows upon has arrived: a process that begins with it does not send it again.
  if (!Flushed()) return;
  ledger_.QueueReport({.step = step_, .loss = LossOf(step_)});
  asked_.clear();
  begun_ = false;
  ++step_;
  checkpoints_.Write(step_, weights, versions_, epoch_);
  SendReport();
}

void SimWorker::SendReport() {
  Process& coordinator = world_.coordinator().process();
  const OwnReport& owed = ledger_.first_owed().report;
  const StepReport report{.session_id = session_,
                          .epoch = epoch_,
                          .rank = rank_,
                          .incarnation = incarnation_,
                          .step = owed.step,
                          .loss = owed.loss};
  world_.network().Send(
      process_, coordinator, [this, report, world = &world_, process = &process_, life = process_.life()] {
        const absl::StatusOr<Directive> directive = world->coordinator().core().ReportStep(report);
        world->network().Send(world->coordinator().process(), *process, [this, report, directive, process, life] {
          if (process->life() == life) OnReported(report.epoch, report.step, directive);
        });
      });
}

void SimWorker::OnReported(uint64_t epoch, uint64_t step, const absl::StatusOr<Directive>& directive) {
  if (epoch != epoch_ || !ledger_.owes() || ledger_.first_owed().report.step != step) return;
  // One of another epoch tells that the job has gone on to it.
  if (directive.ok() ? directive->epoch != epoch : RecoveryFor(directive.status()) == Recovery::kRefreshEpoch)
    SendJoin();
  const absl::StatusOr<WorkerDirective> decoded =
      directive.ok() ? DirectiveOf(*directive) : absl::StatusOr<WorkerDirective>(directive.status());
  switch (ledger_.MarkAnswered(1, decoded)) {
    case StepLedger::Verdict::kAskAgain:
      return;
    case StepLedger::Verdict::kRefused:
      return OnError(directive.status());
    case StepLedger::Verdict::kAnswered:
      if (ledger_.owes()) return SendReport();
      if (!begun_) BeginStep();
  }
}

}  // namespace precondor::sim

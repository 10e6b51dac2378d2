// SPDX-License-Identifier: Apache-2.0
// The events of a layer: contributions, ranks and epochs, the worker's results, factors and replay. layer_effects.cc
// carries out what the machine decides on them.
#include "server/core/layer/layer_driver.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/time/time.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {

void LayerCounters::CountUpdate(const LayerWorker::UpdateOutcome& outcome) {
  if (!outcome.attempted || !outcome.status.ok()) return;
  update_seconds_ += absl::ToDoubleSeconds(outcome.took);
  stats_.update_seconds = update_seconds_ / static_cast<double>(++updates_);
}

void LayerCounters::CountAnswer(const GradientResult& answer) {
  switch (answer.decision) {
    case Decision::kPreconditioned:
      precondition_seconds_ += absl::ToDoubleSeconds(answer.took.precondition);
      stats_.precondition_seconds = precondition_seconds_ / static_cast<double>(++stats_.preconditioned);
      break;
    case Decision::kIdentity:
      ++stats_.identity;
      break;
    case Decision::kSkip:
      ++stats_.skipped;
      break;
  }
}

void LayerCounters::Show(const LayerWorker::StateView& view) {
  stats_.factor_version = view.version;
  stats_.state_bytes = view.bytes;
  stats_.input_representation = view.summary.input_representation;
  stats_.output_representation = view.summary.output_representation;
  stats_.input_rank = view.summary.input_rank;
  stats_.output_rank = view.summary.output_rank;
  stats_.input_damping = view.summary.input_damping;
  stats_.output_damping = view.summary.output_damping;
  stats_.failed_decompositions = view.summary.failed_decompositions;
  stats_.factor_resets = view.summary.resets;
}

namespace {

LayerRules RulesOf(const SessionContext& session, uint32_t layer) {
  const ShardOptions& options = session.shard->options;
  return {.spec = &session.spec,
          .layer = layer,
          .needs_statistics = session.methods.of(layer).needs_statistics(),
          .window_steps = static_cast<uint64_t>(options.window_steps)};
}

}  // namespace

absl::StatusOr<std::shared_ptr<LayerDriver>> LayerDriver::Create(std::shared_ptr<SessionContext> session,
                                                                 uint32_t layer, const SessionInstall& install) {
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<LayerState> state, session->MakeState(layer));
  return std::shared_ptr<LayerDriver>(new LayerDriver(std::move(session), layer, install, std::move(state)));
}

LayerDriver::LayerDriver(std::shared_ptr<SessionContext> session, uint32_t layer, const SessionInstall& install,
                         std::unique_ptr<LayerState> state)
    : session_(std::move(session)),
      layer_(layer),
      executor_(session_->shard->executor),
      strand_(executor_.NewStrandOf(session_->session_id, session_->layers_at_once)),
      worker_(*session_, layer, std::move(state)),
      journal_(*session_, layer, install.rollback_epoch),
      machine_(RulesOf(*session_, layer), install.epoch, install.rollback_epoch, install.members),
      steps_(session_->spec, layer),
      counters_(layer, session_->spec.layers[layer].name) {
  NoteFactorsReplaced();
}

absl::Status LayerDriver::Check(const ContributionHeader& header) const {
  MutexLock lock(mu_);
  return machine_.Check(header);
}

// --- contributions --------------------------------------------------------------------------------------------------

// A contribution is staged and filed in the machine's slot of its rank, and its sender gets an acknowledgement. When
// all ranks have sent theirs, the layer's strand updates the factors with the step's statistics, or makes the answer to
// its gradients, and gives it to all requests that wait.
void LayerDriver::Submit(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result) {
  const ContributionHeader& header = contribution.header();
  Staged staged = Stage(contribution, std::move(payload));
  const bool statistics = header.kind == ContributionKind::kStatistics;
  Feed(ContributionArrived{.key = header.key,
                           .kind = header.kind,
                           .mode = header.mode,
                           .status = staged.status,
                           .digest = staged.digest,
                           .elements = SentElements(staged.contribution.parts),
                           .now = session_->shard->clock.Now()},
       {.reply =
            [&](const SenderReply& reply) {
              // A refused gradient gets its error when it first arrives, and the step's answer when it is repeated.
              const bool has_answer = reply.duplicate && !statistics;
              const absl::Status& refusal = reply.status.ok() && !has_answer ? staged.refusal : reply.status;
              LayerObserver& observer = session_->shard->layer_observer;
              if (!refusal.ok()) {
                CountRefusal(header.kind, refusal);
                return ack(refusal);
              }
              if (reply.duplicate) {
                observer.OnDuplicate(session_->spec.name, header.kind);
              } else {
                observer.OnContribution(session_->spec.name, header.kind,
                                        static_cast<int64_t>(contribution.payload_bytes()));
              }
              ack(reply.duplicate);
              if (statistics) return;
              RequestAnswer({.key = header.key, .result = std::move(result), .parts = header.parts});
            },
        .payload = &staged.contribution});
}

LayerDriver::Staged LayerDriver::Stage(AdmittedContribution& admitted, Payload payload) const {
  const ContributionHeader& header = admitted.header();
  admitted.Inspect(payload);
  Staged staged{.digest = Digest(header, admitted.facts()), .contribution = {.samples = header.samples}};
  if (header.abstain) return staged;
  StagedContribution& contribution = staged.contribution;
  if (header.kind == ContributionKind::kStatistics) {
    staged.refusal =
        CheckStatistics(session_->spec, header, payload, session_->shard->options.max_norm_per_sqrt_element);
    contribution.scales = {header.tensors[0].scale, header.tensors[1].scale};
    contribution.rows = RowsOf(session_->spec, header);
  } else if (header.kind == ContributionKind::kGradient) {
    staged.refusal = CheckGradient(session_->spec, header, admitted.facts(),
                                   session_->methods.of(layer_).traits().max_gradient_norm());
    contribution.scales[0] = header.tensors.empty() ? 1.0f : header.tensors[0].scale;
    std::copy_if(header.parts.begin(), header.parts.end(), std::back_inserter(contribution.parts),
                 [](const GradientPart& part) { return part.sent; });
    contribution.on_device = header.on_device;
  }
  contribution.bytes = std::move(payload);
  staged.status = staged.refusal.ok() ? ContributionStatus::kPresent : ContributionStatus::kRefused;
  return staged;
}

void LayerDriver::CountRefusal(ContributionKind kind, const absl::Status& why) {
  session_->shard->layer_observer.OnRejected(session_->spec.name, kind, GetErrorReason(why));
  MutexLock lock(mu_);
  counters_.CountRejected();
}

void LayerDriver::RequestAnswer(AnswerRequest request) {
  Feed(AnswerRequested{request.key},
       {.reply = [&](const SenderReply& refusal) { request.result(refusal.status); }, .request = &request});
}

void LayerDriver::Fetch(const ContributionKey& key, ResultFn result) {
  AnswerRequest request{.key = key, .result = std::move(result)};
  Feed(FactorsRequested{.key = key, .now = session_->shard->clock.Now()},
       {.reply = [&](const SenderReply& refusal) { request.result(refusal.status); }, .request = &request});
}

void LayerDriver::PostFetch(ResultFn result) {
  session_->shard->in_flight.fetch_add(1, std::memory_order_relaxed);
  Post([answer = std::move(result)](LayerDriver& layer) {
    const SessionSpec& spec = layer.session_->spec;
    ShardContext& shard = *layer.session_->shard;
    layer.Feed(FactorsNeeded{});
    // The update of a step that was acknowledged a moment ago may not have been posted yet.
    if (!WorkersPrecondition(spec)) layer.Run();
    absl::StatusOr<GradientResult> fetched = layer.worker_.Fetch();
    if (fetched.ok()) shard.layer_observer.OnFetch(spec.name, fetched->payload_bytes());
    answer(std::move(fetched));
    shard.in_flight.fetch_sub(1, std::memory_order_relaxed);
  });
}

// --- ranks and epochs -----------------------------------------------------------------------------------------------

absl::StatusOr<uint64_t> LayerDriver::Resume(const RankResume& resume) {
  absl::Status refusal;
  uint64_t lost = 0;
  Feed(RankResumed{resume, session_->shard->clock.Now()},
       {.reply = [&](const SenderReply& reply) { refusal = reply.status; }, .updates_lost = &lost});
  if (!refusal.ok()) return refusal;
  return lost;
}

uint64_t LayerDriver::EndEpoch(uint64_t epoch, const absl::Status& why) {
  uint64_t first_kept = 0;
  Sender no_sender;
  Rest rest;
  {
    MutexLock lock(mu_);
    first_kept = machine_.first_kept();
    rest = Begin(EpochEnded{.epoch = epoch, .why = why}, no_sender);
  }
  Finish(rest);
  return first_kept;
}

void LayerDriver::BeginEpoch(const EpochBegan& began) { Feed(began); }

void LayerDriver::Close(const absl::Status& why) { Feed(Closed{why}); }

// --- the worker -----------------------------------------------------------------------------------------------------

void LayerDriver::Post(absl::AnyInvocable<void(LayerDriver&)> task) {
  // Tasks have to be copyable.
  auto shared = std::make_shared<absl::AnyInvocable<void(LayerDriver&)>>(std::move(task));
  executor_.Post(strand_, [self = shared_from_this(), shared] { (*shared)(*self); });
}

void LayerDriver::Update(const ApplyUpdate& effect, StepData& data) {
  const std::string& job = session_->spec.name;
  const std::string& layer = session_->spec.layers[layer_].name;
  ShardContext& shard = *session_->shard;
  LayerWorker::UpdateOutcome outcome = worker_.Update(std::move(data.due));
  data.update = std::move(outcome.update);
  if (outcome.attempted) data.update_took = outcome.took;
  const bool failed = outcome.attempted && !outcome.status.ok();
  if (outcome.attempted) shard.layer_observer.OnUpdate(job, outcome.took, outcome.status.ok());
  if (failed) {
    shard.logger.Log(Severity::kWarning, "factor update failed; the last good factors stay",
                     {{"session", job},
                      {"step", effect.step},
                      {"layer", layer},
                      {"reason", absl::string_view(outcome.status.message())}});
  }
  if (outcome.decomposition_failed) {
    shard.logger.Log(Severity::kWarning,
                     outcome.reset ? "factors failed to decompose again and are reset"
                                   : "factors were not decomposed; the last good decomposition stays",
                     {{"session", job}, {"step", effect.step}, {"layer", layer}});
  }
  {
    MutexLock lock(mu_);
    counters_.CountUpdate(outcome);
  }
  const LayerWorker::StateView view = ShowFactors();
  Feed(UpdateDone{.id = effect.id,
                  .step = effect.step,
                  .logged = effect.logged,
                  .restored = effect.logged && !effect.empty,
                  .failed = failed,
                  .factor_version = view.version});
}

void LayerDriver::Answer(const ComputeAnswer& effect, StepData& data, std::vector<StagedContribution> contributions) {
  data.mode = effect.mode;
  data.plan = effect.plan;
  const bool plan_holds = !data.plan.has_value() || !worker_.LacksGradientsOf(*data.plan);
  if (!plan_holds) data.plan.reset();
  const bool skipped = data.plan.has_value() && data.plan->decision == Decision::kSkip;
  const std::string& skip_reason = skipped ? data.plan->reason : effect.skip_reason;
  GradientResult answer;
  if (WorkersPrecondition(session_->spec)) {
    answer = worker_.PublishUpdate(data);
  } else if (!skip_reason.empty()) {
    answer = worker_.Skip(data, skipped ? AnswerCause::kRecovered : AnswerCause::kAbstained, skip_reason);
  } else {
    worker_.Average(data, std::move(contributions));
    // The record must be in the journal before the factors change: ranks may learn of the answer right afterwards.
    if (worker_.LearnsFrom(data)) journal_.BeforeGradient(effect.step, worker_, data);
    answer = worker_.Precondition(data);
    if (answer.decision == Decision::kPreconditioned) {
      session_->shard->layer_observer.OnPrecondition(session_->spec.name, answer.took.precondition);
    }
  }
  answer.took.update = data.update_took;
  const LayerWorker::StateView view = ShowFactors();
  AnswerDone done{.id = effect.id, .plan = PlanOf(answer), .plan_holds = plan_holds, .factor_version = view.version};
  {
    MutexLock lock(mu_);
    data.answer = std::move(answer);
  }
  Feed(done);
}

void LayerDriver::LogAnswer(uint64_t step, const GradientResult& answer) {
  const bool skipped = answer.decision == Decision::kSkip;
  if (!skipped && (answer.decision != Decision::kIdentity || answer.cause != AnswerCause::kFailed)) return;
  // The others are in precondor_plans_total: a layer that no rank uses is skipped in each step.
  const bool told = answer.cause == AnswerCause::kAbstained && told_of_skip_.exchange(true);
  session_->shard->logger.Log(
      told ? Severity::kInfo : Severity::kWarning, skipped ? "step skipped" : "gradient not preconditioned",
      {{"session", session_->spec.name}, {"step", step}, {"layer", spec().name}, {"reason", answer.reason}});
}

void LayerDriver::Give(const GradientResult& answer, std::vector<AnswerRequest>& requests, StepData& data) {
  const bool sharded = session_->spec.exchange == ExchangeMode::kSharded;
  for (AnswerRequest& request : requests) {
    absl::StatusOr<GradientResult> own = sharded ? data.answer_parts.Cut(spec(), request.parts, answer) : answer;
    if (own.ok()) {
      session_->shard->layer_observer.OnResult(session_->spec.name, own->decision, own->payload_bytes());
    }
    request.result(std::move(own));
  }
}

// --- factors and replay ---------------------------------------------------------------------------------------------

void LayerDriver::RestoreFactors(std::unique_ptr<LayerState> state, uint64_t step) {
  Post([next = std::move(state), step](LayerDriver& layer) mutable {
    layer.worker_.SetState(std::move(next));
    layer.GiveImage(step);
    layer.NoteFactorsReplaced();
  });
}

void LayerDriver::GiveImage(uint64_t step) {
  uint64_t rollback_epoch = 0;
  {
    MutexLock lock(mu_);
    rollback_epoch = machine_.rollback_epoch();
  }
  journal_.GiveImage(rollback_epoch, step, worker_);
}

LayerWorker::StateView LayerDriver::ShowFactors() {
  const LayerWorker::StateView view = worker_.view();
  MutexLock lock(mu_);
  counters_.Show(view);
  return view;
}

void LayerDriver::NoteFactorsReplaced() {
  const LayerWorker::StateView view = ShowFactors();
  Feed(FactorsReplaced{.factor_version = view.version});
}

LayerReplay& LayerDriver::replay() {
  if (replay_ == nullptr) {
    replay_ = std::make_unique<LayerReplay>(worker_, session_->shard->options.window_steps);
  }
  return *replay_;
}

void LayerDriver::FinishReplay() {
  Sender no_sender;
  Rest rest;
  {
    MutexLock lock(mu_);
    LayerReplay::Outcome outcome = replay().Finish(machine_.rollback_epoch());
    replay_.reset();
    const LayerWorker::StateView view = worker_.view();
    ReplayFinished event{.rollback_epoch = outcome.rollback_epoch,
                         .steps = {},
                         .factor_version = view.version,
                         .now = session_->shard->clock.Now()};
    std::vector<StepOutcome> outcomes;
    uint64_t last_learned = 0;  // the step whose answer the factors can repeat; its plan is as old as they are
    for (const auto& [step, replayed] : outcome.steps) {
      if (replayed.answer.has_value()) last_learned = step;
    }
    for (auto& [step, replayed] : outcome.steps) {
      const bool pending = replayed.contributions.has_value();
      const bool answered = replayed.answer.has_value();
      const std::optional<Plan>& plan = replayed.outcome.plan;
      event.steps.push_back({.step = step,
                             .mode = replayed.outcome.mode,
                             .plan = plan,
                             .updated = replayed.outcome.updated,
                             .update_pending = pending,
                             .update_is_empty = pending && (replayed.failed || replayed.contributions->empty()),
                             .answered = answered,
                             .passed = !answered && plan.has_value() && plan->decision == Decision::kPreconditioned &&
                                       plan->factor_version < view.version + (step < last_learned ? 1 : 0)});
      outcomes.push_back(replayed.outcome);
      outcomes.back().updated = replayed.outcome.updated && !pending;
      counters_.CountSealed(step);
      session_->begun_steps.Begin(outcome.rollback_epoch, step, replayed.outcome.mode);
    }
    journal_.Resume(outcome.rollback_epoch, outcome.updates, std::move(outcomes));
    counters_.Show(view);
    rest = Begin(event, no_sender);
    for (const auto& [step, of] : machine_.window().steps()) {
      ReplayedStep& replayed = outcome.steps.at(step);
      StepData& data = *steps_.Of(of.id);
      data.answer = std::move(replayed.answer);
      // A drain may end between a step's update and its answer.
      data.restored_update = replayed.in_image && !of.plan.has_value();
      if (of.pending_update.has_value() && !replayed.failed) data.due = *std::move(replayed.contributions);
    }
  }
  Finish(rest);
}

void LayerDriver::GiveFinalImage(uint64_t step, std::function<void()> done) {
  Post([step, done = std::move(done)](LayerDriver& layer) {
    layer.Feed(FactorsNeeded{});
    layer.GiveImage(step);
    done();
  });
}

// --- stragglers and counters -----------------------------------------------------------------------------------------

void LayerDriver::AddStragglers(absl::Time since, Stragglers& stragglers) const {
  MutexLock lock(mu_);
  machine_.AddStragglers(since, stragglers);
}

std::set<uint32_t> LayerDriver::MissingRanks(uint64_t step) const {
  MutexLock lock(mu_);
  return machine_.MissingRanks(step);
}

LayerStats LayerDriver::stats() const {
  MutexLock lock(mu_);
  return counters_.stats();
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Carries out the effects of LayerDriver's machine: the work of the layer's strand, and telling those who wait.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/core/layer/layer_driver.h"

namespace precondor {
namespace {

template <typename... Functions>
struct Overload : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overload(Functions...) -> Overload<Functions...>;

}  // namespace

void LayerDriver::Run() {
  for (;;) {
    Tasks tasks = FeedLocked(WorkerReady{});
    if (tasks.empty()) return;
    Perform(std::move(tasks));
  }
}

void LayerDriver::Perform(Tasks tasks) {
  const std::string& job = session_->spec.name;
  const std::string& layer = session_->spec.layers[layer_].name;
  ShardContext& shard = *session_->shard;
  for (size_t i = 0; i < tasks.size(); ++i) {
    Task& task = tasks[i];
    std::visit(
        Overload{
            [&](const ReportSealed& effect) {
              shard.observer.OnSealed(job, effect.kind, effect.open_for);
              if (effect.given_up.empty()) return;
              shard.logger.Log(
                  Severity::kWarning, "statistics sealed without all ranks",
                  {{"session", job}, {"step", effect.step}, {"layer", layer}, {"reason", effect.given_up}});
            },
            [&](const ReportUpdatesLost& effect) {
              shard.observer.OnUpdatesLost(job, static_cast<int64_t>(effect.lost));
              shard.logger.Log(Severity::kWarning, "factor updates are lost",
                               {{"session", job},
                                {"layer", layer},
                                {"rank", effect.rank},
                                {"updates", effect.lost},
                                {"answered_with", effect.answered_with},
                                {"has", effect.known}});
            },
            [&](const ReportContradiction& effect) {
              shard.logger.Log(Severity::kError, "an answer cannot be repeated",
                               {{"reason", absl::string_view(effect.why.message())}});
            },
            [&](const EndRequests& effect) {
              for (ResultFn& request : task.requests) request(effect.status);
            },
            [&](const WakeWorker&) { executor_.Post(strand_, [self = shared_from_this()] { self->Run(); }); },
            [&](const BeginStep& effect) { journal_.BeginStep(effect.rollback_epoch, effect.step, worker_); },
            [&](const AccumulateGradient&) { worker_.Accumulate(*task.data, std::move(task.contributions.front())); },
            // The update comes next.
            [&](const AppendUpdate& effect) {
              journal_.BeforeUpdate(effect.step, tasks[i + 1].contributions, effect.logged);
            },
            [&](const ApplyUpdate& effect) { Update(effect, task); },
            [&](const AppendFailedUpdate& effect) { journal_.AfterFailedUpdate(effect.step); },
            [&](const ComputeAnswer& effect) { Answer(effect, task); },
            [&](const AppendPlan& effect) { journal_.BeforeAnswer(effect.step, effect.mode, effect.plan); },
            [&](const DeliverAnswer& effect) { Deliver(effect.id); },
            // Prepare, or who fed the event, has seen to the others.
            [](const auto&) {}},
        task.effect);
  }
}

// --- updates --------------------------------------------------------------------------------------------------------

void LayerDriver::Update(const ApplyUpdate& effect, Task& task) {
  const std::string& job = session_->spec.name;
  const std::string& layer = session_->spec.layers[layer_].name;
  ShardContext& shard = *session_->shard;
  LayerWorker::UpdateOutcome outcome = worker_.Update(std::move(task.contributions));
  task.data->update = std::move(outcome.update);
  const bool failed = outcome.attempted && !outcome.status.ok();
  if (outcome.attempted) shard.observer.OnUpdate(job, outcome.took, outcome.status.ok());
  if (failed) {
    shard.logger.Log(Severity::kWarning, "factor update failed; the last good factors stay",
                     {{"session", job},
                      {"step", effect.step},
                      {"layer", layer},
                      {"reason", absl::string_view(outcome.status.message())}});
  }
  if (outcome.decomposition_failed) {
    shard.logger.Log(Severity::kWarning,
                     outcome.reset ? "factors were not decomposed, again, and begin anew"
                                   : "factors were not decomposed; the last good decomposition stays",
                     {{"session", job}, {"step", effect.step}, {"layer", layer}});
  }
  Tasks tasks;
  {
    MutexLock lock(mu_);
    Count(outcome);
    tasks = Feed(UpdateDone{.id = effect.id,
                            .step = effect.step,
                            .logged = effect.logged,
                            .restored = effect.restored,
                            .failed = failed,
                            .held = outcome.state.held,
                            .factor_version = outcome.state.version});
  }
  Perform(std::move(tasks));
}

void LayerDriver::Count(const LayerWorker::UpdateOutcome& outcome) {
  Show(outcome.state);
  if (!outcome.attempted || !outcome.status.ok()) return;
  update_seconds_ += absl::ToDoubleSeconds(outcome.took);
  stats_.update_seconds = update_seconds_ / static_cast<double>(++updates_);
}

// --- answers --------------------------------------------------------------------------------------------------------

void LayerDriver::Answer(const ComputeAnswer& effect, Task& task) {
  StepData& data = *task.data;
  data.mode = effect.mode;
  data.plan = effect.plan;
  const bool plan_holds = !data.plan.has_value() || !worker_.LacksGradientsOf(*data.plan);
  if (!plan_holds) data.plan.reset();
  const bool skipped = data.plan.has_value() && data.plan->decision == Decision::kSkip;
  const std::string& skip_reason = skipped ? data.plan->reason : effect.skip_reason;
  LayerWorker::Answer answer = WorkersPrecondition(session_->spec) ? worker_.Hand(data)
                               : skip_reason.empty() ? worker_.Precondition(data, std::move(task.contributions))
                                                     : worker_.Skip(data, skip_reason);
  if (answer.preconditioned) session_->shard->observer.OnPrecondition(session_->spec.name, answer.took);
  const GradientResult& result = answer.result;
  Tasks tasks;
  {
    MutexLock lock(mu_);
    Show(answer.state);
    tasks = Feed(AnswerDone{
        .id = effect.id,
        .plan = {.decision = result.decision, .factor_version = result.factor_version, .reason = result.reason},
        .plan_holds = plan_holds,
        .held = answer.state.held,
        .factor_version = answer.state.version});
    const bool delivers = std::any_of(tasks.begin(), tasks.end(), [](const Task& next) {
      return std::holds_alternative<DeliverAnswer>(next.effect);
    });
    if (delivers) Count(answer);
    data.answer = std::move(answer.result);
  }
  Perform(std::move(tasks));
}

void LayerDriver::Count(const LayerWorker::Answer& answer) {
  switch (answer.result.decision) {
    case Decision::kPreconditioned:
      precondition_seconds_ += absl::ToDoubleSeconds(answer.took);
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

void LayerDriver::Deliver(StepId id) {
  const std::string& job = session_->spec.name;
  ShardContext& shard = *session_->shard;
  for (Task& task : FeedLocked(AnswerVisible{id})) {
    const GradientResult& result = *task.answer;
    if (result.decision == Decision::kSkip) {
      shard.logger.Log(Severity::kWarning, "step skipped",
                       {{"session", job},
                        {"step", std::get<GiveAnswer>(task.effect).step},
                        {"layer", session_->spec.layers[layer_].name},
                        {"reason", result.reason}});
    }
    const int64_t bytes = result.payload_bytes();
    for (ResultFn& request : task.requests) {
      shard.observer.OnResult(job, result.decision, bytes);
      request(result);
    }
  }
  // Only now: a drain that sees nothing in flight may close what the requests write to.
  FeedLocked(AnswerDelivered{});
}

// --- factors that come and go ---------------------------------------------------------------------------------------

void LayerDriver::SetState(std::unique_ptr<LayerState> state, uint64_t release) {
  // Tasks have to be copyable.
  auto next = std::make_shared<std::unique_ptr<LayerState>>(std::move(state));
  executor_.Post(strand_, [self = shared_from_this(), next, release] {
    self->ApplyPendingUpdates();
    self->ReplaceState(std::move(*next), release);
  });
}

void LayerDriver::ReleaseState(uint64_t release, ReleasedFn done) {
  executor_.Post(strand_, [self = shared_from_this(), release, done = std::move(done)] {
    self->ApplyPendingUpdates();
    if (!self->worker_.has_factors()) return done(absl::NotFoundError("the layer has no factors"));
    const bool kept = self->session_->shard->options.journal != nullptr;
    absl::StatusOr<std::string> state = kept ? self->worker_.Save() : absl::NotFoundError("there is no data directory");
    self->ReplaceState(nullptr, kept ? release : 0);
    done(std::move(state));
  });
}

void LayerDriver::ReplaceState(std::unique_ptr<LayerState> state, uint64_t release) {
  worker_.SetState(std::move(state));
  journal_.FactorsChanged(worker_.has_factors(), release);
  ShowFactors();
}

void LayerDriver::Restore(std::unique_ptr<LayerState> state, uint64_t step) {
  auto next = std::make_shared<std::unique_ptr<LayerState>>(std::move(state));
  executor_.Post(strand_, [self = shared_from_this(), next, step] {
    self->worker_.SetState(std::move(*next));
    self->journal_.BeginAt(step, self->worker_);
    self->ShowFactors();
  });
}

void LayerDriver::ShowFactors() {
  const LayerWorker::StateView view = worker_.view();
  MutexLock lock(mu_);
  Show(view);
  Feed(FactorsReplaced{.held = view.held, .factor_version = view.version});
}

void LayerDriver::Show(const LayerWorker::StateView& view) {
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

// --- coming back ----------------------------------------------------------------------------------------------------

LayerReplay& LayerDriver::replay() {
  if (replay_ == nullptr) {
    const auto read = [this](uint64_t release) -> absl::StatusOr<std::string> {
      ShardJournal* const journal = session_->shard->options.journal;
      if (journal == nullptr) return absl::NotFoundError("there is no journal");
      return journal->ReadFactors(session_->session_id, release, layer_);
    };
    replay_ = std::make_unique<LayerReplay>(worker_, session_->shard->options.window_steps, read);
  }
  return *replay_;
}

void LayerDriver::FinishReplay() {
  Tasks tasks;
  {
    MutexLock lock(mu_);
    LayerReplay::Outcome outcome = replay().Finish(machine_.rollback_epoch(), session_->spec.staleness_steps);
    replay_.reset();
    const LayerWorker::StateView view = worker_.view();
    ReplayFinished event{.rollback_epoch = outcome.began,
                         .steps = {},
                         .held = view.held,
                         .factor_version = view.version,
                         .now = session_->shard->clock.Now()};
    std::vector<SettledStep> settled;
    for (auto& [step, replayed] : outcome.steps) {
      const bool pending = replayed.contributions.has_value();
      event.steps.push_back({.step = step,
                             .mode = replayed.settled.mode,
                             .plan = replayed.settled.plan,
                             .updated = replayed.settled.updated,
                             .update_pending = pending,
                             .update_is_empty = pending && (replayed.failed || replayed.contributions->empty())});
      settled.push_back(replayed.settled);
      settled.back().updated = replayed.settled.updated && !pending;
      stats_.last_sealed_step = std::max(stats_.last_sealed_step, step);
      RaiseTo(session_->last_step, step);
    }
    journal_.Resume(outcome.began, outcome.updates, outcome.release, std::move(settled));
    released_ = std::move(outcome.released);
    Show(view);
    tasks = Feed(event);
    for (const auto& [step, of] : machine_.window().steps()) {
      ReplayedStep& replayed = outcome.steps.at(step);
      if (!of.pending_update.has_value()) continue;
      DataOf(of.id)->logged = replayed.failed ? std::vector<StagedContribution>() : *std::move(replayed.contributions);
    }
  }
  Perform(std::move(tasks));
}

}  // namespace precondor

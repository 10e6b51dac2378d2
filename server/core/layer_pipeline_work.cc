// SPDX-License-Identifier: Apache-2.0
// The strand's half of LayerPipeline: what is next, doing it, and telling those who wait.
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/core/layer_pipeline.h"

namespace precondor {
namespace {

bool SameAs(const Plan& plan, const GradientResult& result) {
  if (plan.decision != result.decision) return false;
  return plan.decision != Decision::kPreconditioned || plan.factor_version == result.factor_version;
}

}  // namespace

void LayerPipeline::Schedule() {
  {
    MutexLock lock(mu_);
    if (scheduled_) return;
    scheduled_ = true;
  }
  executor_.Post(strand_, [self = shared_from_this()] { self->Run(); });
}

void LayerPipeline::Run() {
  for (;;) {
    Work work = NextWork();
    switch (work.kind) {
      case WorkKind::kNone:
        return;
      case WorkKind::kFold:
        for (Vote& vote : work.votes) worker_.Fold(*work.slot, std::move(vote));
        break;
      case WorkKind::kUpdate:
        Update(work);
        break;
      case WorkKind::kAnswer:
        Answer(work);
        break;
      case WorkKind::kExpire:
        for (ResultFn& waiter : work.waiters) waiter(Expired());
        break;
    }
  }
}

void LayerPipeline::Update(Work& work) {
  const uint64_t step = work.slot->step;
  journal_.BeginStep(work.began, step, worker_);
  journal_.BeforeUpdate(step, work.votes, work.logged);
  const bool restored = work.logged && !work.votes.empty();
  LayerWorker::UpdateOutcome outcome = worker_.Update(std::move(work.votes));
  work.slot->update = std::move(outcome.update);
  if (outcome.attempted && !outcome.status.ok() && !work.logged) journal_.AfterFailedUpdate(step);
  FinishUpdate(*work.slot, outcome, restored);
}

void LayerPipeline::Answer(Work& work) {
  StepSlot& slot = *work.slot;
  journal_.BeginStep(work.began, slot.step, worker_);
  if (slot.plan.has_value() && worker_.LacksGradientsOf(*slot.plan)) slot.plan.reset();
  if (slot.plan.has_value() && slot.plan->decision == Decision::kSkip) work.skip_reason = slot.plan->reason;
  LayerWorker::Answer answer = WorkersPrecondition(session_->spec) ? worker_.Hand(slot)
                               : work.skip_reason.empty()          ? worker_.Precondition(slot, std::move(work.votes))
                                                                   : worker_.Skip(slot, work.skip_reason);
  if (!slot.plan.has_value()) {
    journal_.BeforeAnswer(slot.step, slot.mode, answer.result);
  } else if (!SameAs(*slot.plan, answer.result)) {
    return Refuse(slot, absl::InternalError(absl::StrCat(
                            "session \"", session_->spec.name, "\" step ", slot.step, " layer \"",
                            session_->spec.layers[layer_].name, "\": was answered ", DecisionName(slot.plan->decision),
                            " with factors ", slot.plan->factor_version,
                            " before the shard came back, and can now only be ", DecisionName(answer.result.decision),
                            " with factors ", answer.result.factor_version, ": ", answer.result.reason)));
  }
  FinishGradient(slot, std::move(answer));
}

void LayerPipeline::Refuse(StepSlot& slot, const absl::Status& why) {
  std::vector<ResultFn> waiters;
  {
    MutexLock lock(mu_);
    const int64_t unanswered = slot.gradient.gather.voted() + slot.gradient.gather.abstained();
    if (slot.gradient.state == PhaseState::kRetired) return;
    slot.in_flight -= unanswered;
    session_->shard->in_flight.fetch_sub(unanswered, std::memory_order_relaxed);
    RetireGradient(slot, waiters);
  }
  session_->shard->logger.Log(Severity::kError, "an answer cannot be repeated",
                              {{"reason", absl::string_view(why.message())}});
  for (ResultFn& waiter : waiters) waiter(why);
}

LayerPipeline::Work LayerPipeline::NextWork() {
  MutexLock lock(mu_);
  if (!owed_updates_.empty()) {
    Work work{.kind = WorkKind::kUpdate, .slot = owed_updates_.front(), .began = began_};
    owed_updates_.erase(owed_updates_.begin());
    work.votes = *std::exchange(work.slot->restored_votes, std::nullopt);
    work.logged = true;
    return work;
  }
  // Adding up needs no turn, and frees the payloads early.
  for (const auto& [step, slot] : slots_) {
    if (WorkersPrecondition(session_->spec)) break;  // there is nothing to add up
    // The weights of the sum are not known before all are in (LayerWorker::Precondition).
    if (session_->spec.data_plane == DataPlane::kCollective) break;
    Phase& phase = slot->gradient;
    if (phase.state != PhaseState::kOpen || phase.gather.abstained() > 0) continue;
    if (std::optional<Vote> vote = phase.gather.TakeNext()) {
      Work work{.kind = WorkKind::kFold, .slot = slot};
      work.votes.push_back(*std::move(vote));
      return work;
    }
  }
  const bool gradient_first = session_->spec.staleness_steps > 0;
  for (const auto& [step, slot] : slots_) {
    for (const bool gradient : {gradient_first, !gradient_first}) {
      Turn turn = gradient ? GradientTurn(slot) : StatisticsTurn(slot);
      turn.work.began = began_;
      if (turn.work.kind != WorkKind::kNone) return std::move(turn.work);
      if (turn.blocked) {
        scheduled_ = false;
        return {};
      }
    }
  }
  scheduled_ = false;
  return {};
}

LayerPipeline::Turn LayerPipeline::StatisticsTurn(const std::shared_ptr<StepSlot>& slot) {
  Phase& phase = slot->statistics;
  if (!ExpectsStatistics(*slot)) return {};
  if (phase.state == PhaseState::kOpen) return {.work = {}, .blocked = true};
  if (phase.state != PhaseState::kSealed) return {};
  // Its predecessor's statistics are in, and the others could go on; but factors go one way.
  if (!slot->restored && IsAwaitedBefore(slot->step)) return {.work = {}, .blocked = true};
  Turn turn;
  turn.work = {.kind = WorkKind::kUpdate, .slot = slot};
  if (slot->restored_votes.has_value()) {
    turn.work.votes = *std::exchange(slot->restored_votes, std::nullopt);
    turn.work.logged = true;
  } else if (phase.skip) {
    phase.gather.DropVotes();
  } else {
    turn.work.votes = phase.gather.TakeRest();
  }
  return turn;
}

LayerPipeline::Turn LayerPipeline::GradientTurn(const std::shared_ptr<StepSlot>& slot) {
  Phase& phase = slot->gradient;
  if (phase.state == PhaseState::kOpen && PassedOver(*slot)) {
    Turn turn{.work = {.kind = WorkKind::kExpire, .slot = slot}};
    RetireGradient(*slot, turn.work.waiters);
    return turn;
  }
  if (phase.state == PhaseState::kOpen) return {.work = {}, .blocked = true};
  if (phase.state != PhaseState::kSealed) return {};
  Turn turn;
  turn.work = {.kind = WorkKind::kAnswer, .slot = slot};
  if (phase.gather.abstained() > 0) {
    turn.work.skip_reason = phase.gather.Culprit();
  } else {
    turn.work.votes = phase.gather.TakeRest();
  }
  return turn;
}

std::vector<LayerPipeline::Work> LayerPipeline::TakeRestoredUpdates() {
  MutexLock lock(mu_);
  std::vector<Work> updates;
  const auto take = [&](const std::shared_ptr<StepSlot>& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Work work{.kind = WorkKind::kUpdate, .slot = slot, .began = began_, .logged = true};
    work.votes = *std::exchange(slot->restored_votes, std::nullopt);
    updates.push_back(std::move(work));
  };
  for (const std::shared_ptr<StepSlot>& slot : std::exchange(owed_updates_, {})) take(slot);
  for (const auto& [step, slot] : slots_) {
    if (slot->restored_votes.has_value() && slot->statistics.state == PhaseState::kSealed) take(slot);
  }
  return updates;
}

void LayerPipeline::SetState(std::unique_ptr<LayerState> state, uint64_t release) {
  // Tasks have to be copyable.
  auto next = std::make_shared<std::unique_ptr<LayerState>>(std::move(state));
  executor_.Post(strand_, [self = shared_from_this(), next, release] {
    for (Work& work : self->TakeRestoredUpdates()) self->Update(work);
    self->ReplaceState(std::move(*next), release);
  });
}

void LayerPipeline::ReleaseState(uint64_t release, ReleasedFn done) {
  executor_.Post(strand_, [self = shared_from_this(), release, done = std::move(done)] {
    for (Work& work : self->TakeRestoredUpdates()) self->Update(work);
    if (!self->worker_.has_factors()) return done(absl::NotFoundError("the layer has no factors"));
    const bool kept = self->session_->shard->options.journal != nullptr;
    absl::StatusOr<std::string> state = kept ? self->worker_.Save() : absl::NotFoundError("there is no data directory");
    self->ReplaceState(nullptr, kept ? release : 0);
    done(std::move(state));
  });
}

void LayerPipeline::ReplaceState(std::unique_ptr<LayerState> state, uint64_t release) {
  worker_.SetState(std::move(state));
  journal_.FactorsChanged(worker_.has_factors(), release);
  const LayerWorker::StateView view = worker_.view();
  MutexLock lock(mu_);
  Show(view);
}

void LayerPipeline::Restore(std::unique_ptr<LayerState> state, uint64_t step) {
  auto next = std::make_shared<std::unique_ptr<LayerState>>(std::move(state));
  executor_.Post(strand_, [self = shared_from_this(), next, step] {
    self->worker_.SetState(std::move(*next));
    self->journal_.BeginAt(step, self->worker_);
    const LayerWorker::StateView view = self->worker_.view();
    MutexLock lock(self->mu_);
    self->Show(view);
  });
}

void LayerPipeline::Show(const LayerWorker::StateView& view) {
  held_ = view.held;
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

void LayerPipeline::FinishUpdate(StepSlot& slot, const LayerWorker::UpdateOutcome& outcome, bool restored) {
  const SessionSpec& spec = session_->spec;
  ShardContext& shard = *session_->shard;
  if (outcome.attempted) {
    shard.observer.OnUpdate(spec.name, outcome.took, outcome.status.ok());
    if (!outcome.status.ok()) {
      shard.logger.Log(Severity::kWarning, "factor update failed; the last good factors stay",
                       {{"session", spec.name},
                        {"step", slot.step},
                        {"layer", spec.layers[layer_].name},
                        {"reason", absl::string_view(outcome.status.message())}});
    }
    if (outcome.decomposition_failed) {
      shard.logger.Log(Severity::kWarning,
                       outcome.reset ? "factors were not decomposed, again, and begin anew"
                                     : "factors were not decomposed; the last good decomposition stays",
                       {{"session", spec.name}, {"step", slot.step}, {"layer", spec.layers[layer_].name}});
    }
  }
  MutexLock lock(mu_);
  Show(outcome.state);
  if (restored) --restored_updates_;
  if (outcome.attempted && outcome.status.ok()) {
    update_seconds_ += absl::ToDoubleSeconds(outcome.took);
    stats_.update_seconds = update_seconds_ / static_cast<double>(++updates_);
  }
  if (slot.statistics.state == PhaseState::kRetired) return;  // its epoch ended meanwhile
  slot.statistics.Advance(PhaseEvent::kApply);
  --slot.in_flight;
  shard.in_flight.fetch_sub(1, std::memory_order_relaxed);
  // A step that left the window stayed for this alone.
  if (slot.step < floor_) slots_.erase(slot.step);
}

void LayerPipeline::FinishGradient(StepSlot& slot, LayerWorker::Answer answer) {
  const SessionSpec& spec = session_->spec;
  ShardContext& shard = *session_->shard;
  if (answer.preconditioned) shard.observer.OnPrecondition(spec.name, answer.took);
  const GradientResult result = std::move(answer.result);
  std::vector<ResultFn> waiters;
  {
    MutexLock lock(mu_);
    Show(answer.state);
    if (slot.gradient.state == PhaseState::kRetired) return;  // its epoch ended meanwhile, and so were the waiters told
    switch (result.decision) {
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
    slot.gradient.Advance(PhaseEvent::kApply);
    slot.result = result;
    waiters.swap(slot.waiters);
  }
  if (result.decision == Decision::kSkip) {
    shard.logger.Log(
        Severity::kWarning, "step skipped",
        {{"session", spec.name}, {"step", slot.step}, {"layer", spec.layers[layer_].name}, {"reason", result.reason}});
  }
  const int64_t bytes = result.payload_bytes();
  for (ResultFn& waiter : waiters) {
    shard.observer.OnResult(spec.name, result.decision, bytes);
    waiter(result);
  }
  // Only now: a drain that sees nothing in flight may close what the waiters write to.
  MutexLock lock(mu_);
  const int64_t answered = slot.gradient.gather.voted() + slot.gradient.gather.abstained();
  if (slot.in_flight == 0) return;  // its epoch ended meanwhile
  slot.in_flight -= answered;
  shard.in_flight.fetch_sub(answered, std::memory_order_relaxed);
}

void LayerPipeline::AddLaggards(absl::Time since, Laggards& laggards) const {
  MutexLock lock(mu_);
  for (const auto& [step, slot] : slots_) {
    for (const Phase* phase : {&slot->statistics, &slot->gradient}) {
      if (phase->state != PhaseState::kOpen || phase->opened_at > since) continue;
      if (!laggards.ranks.empty() && step > laggards.step) continue;
      if (step < laggards.step) laggards.ranks.clear();
      laggards.step = step;
      for (uint32_t rank : phase->gather.missing()) laggards.ranks.insert(rank);
    }
  }
}

LayerStats LayerPipeline::stats() const {
  MutexLock lock(mu_);
  return stats_;
}

}  // namespace precondor

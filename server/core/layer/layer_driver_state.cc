// SPDX-License-Identifier: Apache-2.0
// Factors that a layer is given or loses, and a layer that comes back from the journal.
#include <memory>
#include <utility>
#include <vector>

#include "server/core/layer/layer_driver.h"

namespace precondor {

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
  counters_.Show(view);
  Feed(FactorsReplaced{.held = view.held, .factor_version = view.version});
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
    std::vector<StepOutcome> outcomes;
    for (auto& [step, replayed] : outcome.steps) {
      const bool pending = replayed.contributions.has_value();
      event.steps.push_back({.step = step,
                             .mode = replayed.outcome.mode,
                             .plan = replayed.outcome.plan,
                             .updated = replayed.outcome.updated,
                             .update_pending = pending,
                             .update_is_empty = pending && (replayed.failed || replayed.contributions->empty())});
      outcomes.push_back(replayed.outcome);
      outcomes.back().updated = replayed.outcome.updated && !pending;
      counters_.CountSealed(step);
      RaiseTo(session_->last_step, step);
    }
    journal_.Resume(outcome.began, outcome.updates, outcome.release, std::move(outcomes));
    released_ = std::move(outcome.released);
    counters_.Show(view);
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

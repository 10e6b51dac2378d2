// SPDX-License-Identifier: Apache-2.0
// Replay of a layer's records from the journal.
#include <memory>
#include <utility>
#include <vector>

#include "server/core/layer/layer_driver.h"

namespace precondor {

LayerReplay& LayerDriver::replay() {
  if (replay_ == nullptr) {
    replay_ = std::make_unique<LayerReplay>(worker_, session_->shard->options.window_steps);
  }
  return *replay_;
}

void LayerDriver::FinishReplay() {
  Tasks tasks;
  {
    MutexLock lock(mu_);
    LayerReplay::Outcome outcome = replay().Finish(machine_.rollback_epoch());
    replay_.reset();
    const LayerWorker::StateView view = worker_.view();
    ReplayFinished event{.rollback_epoch = outcome.rollback_epoch,
                         .steps = {},
                         .held = view.held,
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
    tasks = Feed(event);
    for (const auto& [step, of] : machine_.window().steps()) {
      ReplayedStep& replayed = outcome.steps.at(step);
      if (replayed.answer.has_value()) DataOf(of.id)->answer = std::move(replayed.answer);
      // A drain may end between a step's update and its answer.
      DataOf(of.id)->restored_update = replayed.in_image && !of.plan.has_value();
      if (!of.pending_update.has_value()) continue;
      DataOf(of.id)->logged = replayed.failed ? std::vector<StagedContribution>() : *std::move(replayed.contributions);
    }
  }
  Perform(std::move(tasks));
}

}  // namespace precondor

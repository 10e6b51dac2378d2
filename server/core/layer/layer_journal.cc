// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_journal.h"

#include <algorithm>
#include <utility>

namespace precondor {

LayerJournal::LayerJournal(SessionContext& session, uint32_t layer, uint64_t rollback_epoch)
    : session_(session),
      journal_(session.shard->options.journal),
      layer_(layer),
      covariances_(StatisticsOf(session.spec, layer) == StatisticsKind::kCovariance),
      rollback_epoch_(rollback_epoch) {}

LayerStep LayerJournal::At(uint64_t step) const {
  return {.session_id = session_.session_id,
          .layer = layer_,
          .step = step,
          .rollback_epoch = rollback_epoch_,
          .updates = updates_};
}

uint64_t LayerJournal::SnapshotStepBefore(uint64_t step) const {
  const uint64_t interval = session_.shard->options.snapshot_interval_steps;
  const uint64_t regular = interval == 0 ? 0 : step / interval * interval;
  const uint64_t asked_for = session_.snapshot_at.load(std::memory_order_relaxed);
  // A requested snapshot is not taken if the layer has passed its step: the image would include later updates.
  return asked_for <= step && asked_for > last_step_ ? std::max(regular, asked_for) : regular;
}

void LayerJournal::NoteRollback(uint64_t rollback_epoch, uint64_t step) {
  if (rollback_epoch == rollback_epoch_) return;
  // The job repeats the steps from here on.
  rollback_epoch_ = rollback_epoch;
  outcomes_.clear();
  last_snapshot_step_ = SnapshotStepBefore(step);
  // The layer may have no work in the first steps.
  const uint64_t resumed_at = std::min(session_.begun_steps.rollback_step(), step);
  last_step_ = resumed_at == 0 ? 0 : resumed_at - 1;
}

void LayerJournal::BeginStep(uint64_t rollback_epoch, uint64_t step, const LayerWorker& worker) {
  if (journal_ == nullptr) return;
  NoteRollback(rollback_epoch, step);
  const uint64_t snapshot_step = SnapshotStepBefore(step);
  last_step_ = step;
  if (snapshot_step > last_snapshot_step_) Keep(snapshot_step, worker);
}

void LayerJournal::GiveImage(uint64_t rollback_epoch, uint64_t step, const LayerWorker& worker) {
  if (journal_ == nullptr) return;
  NoteRollback(rollback_epoch, step);
  Keep(step, worker);
}

void LayerJournal::Keep(uint64_t snapshot_step, const LayerWorker& worker) {
  last_snapshot_step_ = snapshot_step;
  absl::StatusOr<std::string> state = worker.Save();
  if (!state.ok()) {
    session_.shard->logger.Log(Severity::kWarning, "no image of the layer; its session's snapshot is left out",
                               {{"session", session_.spec.name},
                                {"step", snapshot_step},
                                {"layer", session_.spec.layers[layer_].name},
                                {"reason", absl::string_view(state.status().message())}});
    return;
  }
  journal_->Keep({.at = At(snapshot_step),
                  .factor_version = worker.view().version,
                  .outcomes = std::vector<StepOutcome>(outcomes_.begin(), outcomes_.end()),
                  .state = *std::move(state)});
}

StepOutcome& LayerJournal::OutcomeOf(uint64_t step, Mode mode) {
  if (outcomes_.empty() || outcomes_.back().step < step) outcomes_.push_back({.step = step, .mode = mode, .plan = {}});
  while (outcomes_.front().step + session_.shard->options.window_steps <= outcomes_.back().step) outcomes_.pop_front();
  for (StepOutcome& outcome : outcomes_) {
    if (outcome.step == step) return outcome;
  }
  // The work is of a step that has left the window. No rank asks for that step again.
  outcomes_.push_front({.step = step, .mode = mode, .plan = {}});
  return outcomes_.front();
}

void LayerJournal::BeforeUpdate(uint64_t step, const LayerWorker& worker,
                                std::vector<StagedContribution>& contributions, bool logged) {
  if (journal_ == nullptr) return;
  OutcomeOf(step, Mode::kSecondOrder).updated = true;
  if (covariances_) {
    if (logged || contributions.empty()) return;
    GradientRecord record{
        .at = At(step), .factor_version = worker.view().version, .covariances = std::move(contributions)};
    if (journal_->AppendGradient(record)) RequestSnapshot();
    contributions = std::move(record.covariances);
    return;
  }
  ++updates_;
  if (logged) return;
  ShardRecord record = UpdateRecord{.at = At(step), .contributions = std::move(contributions)};
  journal_->Append(record);
  contributions = std::move(std::get<UpdateRecord>(record).contributions);
}

void LayerJournal::AfterFailedUpdate(uint64_t step) {
  if (journal_ != nullptr && !covariances_) journal_->Append(FailedUpdateRecord{At(step)});
}

void LayerJournal::BeforeGradient(uint64_t step, LayerWorker& worker, StepData& data) {
  if (journal_ == nullptr) return;
  absl::StatusOr<StagedContribution> average = worker.TakeAverage(data);
  // The device does not give the gradient back, so that the method cannot use it either.
  if (!average.ok()) return;
  GradientRecord record{.at = At(step), .factor_version = worker.view().version, .average = *std::move(average)};
  if (journal_->AppendGradient(record)) RequestSnapshot();
  worker.PutBack(std::move(record.average), data);
}

void LayerJournal::RequestSnapshot() {
  const uint64_t last = session_.begun_steps.last().step;
  uint64_t requested = session_.snapshot_at.load(std::memory_order_relaxed);
  if (requested > last) return;  // that snapshot is yet to be taken
  // Layers may begin the next steps meanwhile. A step beyond their window has not begun in any of them.
  session_.snapshot_at.compare_exchange_strong(requested, last + session_.shard->options.window_steps + 1,
                                               std::memory_order_relaxed);
}

void LayerJournal::BeforeAnswer(uint64_t step, Mode mode, const Plan& plan) {
  if (journal_ == nullptr) return;
  OutcomeOf(step, mode).plan = plan;
  journal_->Append(PlanRecord{.at = At(step), .mode = mode, .plan = plan});
}

void LayerJournal::Resume(uint64_t rollback_epoch, uint64_t updates, std::vector<StepOutcome> outcomes) {
  rollback_epoch_ = rollback_epoch;
  updates_ = updates;
  outcomes_.assign(std::make_move_iterator(outcomes.begin()), std::make_move_iterator(outcomes.end()));
  // The snapshot as of this step already has the layer's image, or never gets it.
  if (outcomes_.empty()) return;
  last_step_ = outcomes_.back().step;
  last_snapshot_step_ = SnapshotStepBefore(last_step_);
}

}  // namespace precondor

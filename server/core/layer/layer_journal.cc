// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_journal.h"

#include <algorithm>
#include <utility>

namespace precondor {

LayerJournal::LayerJournal(SessionContext& session, uint32_t layer, uint64_t began)
    : session_(session),
      journal_(session.shard->options.journal),
      layer_(layer),
      logs_updates_(StatisticsOf(session.spec, layer) != StatisticsKind::kCovariance),
      began_(began) {}

LayerStep LayerJournal::At(uint64_t step) const {
  return {.session_id = session_.session_id, .layer = layer_, .step = step, .began = began_, .updates = updates_};
}

uint64_t LayerJournal::CutBefore(uint64_t step) const {
  const uint64_t interval = session_.shard->options.snapshot_interval_steps;
  const uint64_t regular = interval == 0 ? 0 : step / interval * interval;
  const uint64_t asked_for = session_.snapshot_at.load(std::memory_order_relaxed);
  // One that the layer had passed when it was asked for is none: the image would hold too much.
  return asked_for <= step && asked_for > last_step_ ? std::max(regular, asked_for) : regular;
}

void LayerJournal::BeginStep(uint64_t began, uint64_t step, const LayerWorker& worker) {
  if (journal_ == nullptr) return;
  if (began != began_) {
    // The job has gone back: what it had come to will come again.
    began_ = began;
    settled_.clear();
    last_cut_ = CutBefore(step);
  }
  const uint64_t cut = CutBefore(step);
  last_step_ = step;
  if (cut > last_cut_) GiveImage(cut, worker);
}

void LayerJournal::BeginAt(uint64_t step, const LayerWorker& worker) {
  if (journal_ != nullptr) GiveImage(step, worker);
}

void LayerJournal::GiveImage(uint64_t cut, const LayerWorker& worker) {
  last_cut_ = cut;
  const bool held = worker.has_factors();
  absl::StatusOr<std::string> state = held ? worker.Save() : std::string();
  if (!state.ok()) {
    session_.shard->logger.Log(Severity::kWarning, "no image of the layer; its session's snapshot is left out",
                               {{"session", session_.spec.name},
                                {"step", cut},
                                {"layer", session_.spec.layers[layer_].name},
                                {"reason", absl::string_view(state.status().message())}});
    return;
  }
  journal_->Keep({.at = At(cut),
                  .factor_version = worker.view().version,
                  .settled = std::vector<SettledStep>(settled_.begin(), settled_.end()),
                  .held = held,
                  .release = release_,
                  .state = *std::move(state)});
}

SettledStep& LayerJournal::Settle(uint64_t step, Mode mode) {
  if (settled_.empty() || settled_.back().step < step) settled_.push_back({.step = step, .mode = mode, .plan = {}});
  while (settled_.front().step + session_.shard->options.window_steps <= settled_.back().step) settled_.pop_front();
  for (SettledStep& settled : settled_) {
    if (settled.step == step) return settled;
  }
  // Work left over from a step that has gone out of the window: nobody will ask for it.
  settled_.push_front({.step = step, .mode = mode, .plan = {}});
  return settled_.front();
}

void LayerJournal::BeforeUpdate(uint64_t step, std::vector<StagedContribution>& contributions, bool logged) {
  if (journal_ == nullptr) return;
  Settle(step, Mode::kSecondOrder).updated = true;
  if (!logs_updates_) return;
  ++updates_;
  if (logged) return;
  ShardRecord record = UpdateRecord{.at = At(step), .contributions = std::move(contributions)};
  journal_->Append(record);
  contributions = std::move(std::get<UpdateRecord>(record).contributions);
}

void LayerJournal::AfterFailedUpdate(uint64_t step) {
  if (journal_ != nullptr && logs_updates_) journal_->Append(FailedUpdateRecord{At(step)});
}

void LayerJournal::BeforeAnswer(uint64_t step, Mode mode, const Plan& plan) {
  if (journal_ == nullptr) return;
  Settle(step, mode).plan = plan;
  journal_->Append(PlanRecord{.at = At(step), .mode = mode, .plan = plan});
}

void LayerJournal::FactorsChanged(bool held, uint64_t release) {
  if (journal_ == nullptr) return;
  ++updates_;
  if (!held) release_ = release;
  const LayerStep at = At(settled_.empty() ? 0 : settled_.back().step);
  journal_->Append(FactorsRecord{.at = at, .held = held, .release = release});
}

void LayerJournal::Resume(uint64_t began, uint64_t updates, uint64_t release, std::vector<SettledStep> settled) {
  began_ = began;
  updates_ = updates;
  release_ = release;
  settled_.assign(std::make_move_iterator(settled.begin()), std::make_move_iterator(settled.end()));
  // The cut that this step passed was seen to, or never will be.
  if (settled_.empty()) return;
  last_step_ = settled_.back().step;
  last_cut_ = CutBefore(last_step_);
}

}  // namespace precondor

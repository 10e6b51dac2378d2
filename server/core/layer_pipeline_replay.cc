// SPDX-License-Identifier: Apache-2.0
// A layer that comes back: what the journal knows of its last steps becomes slots again.
#include <algorithm>
#include <utility>

#include "server/core/layer_pipeline.h"

namespace precondor {

LayerReplay& LayerPipeline::replay() {
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

namespace {

// An answer shows that the updates before it were made: those without a record (LayerJournal) are given up, so that
// nobody waits for statistics that ranks may keep no more.
void GiveUpUnlogged(uint64_t staleness, std::map<uint64_t, ReplayedStep>& steps) {
  bool answered = false;  // this step, or the one after it where answers are a step behind
  for (auto later = steps.rbegin(); later != steps.rend(); ++later) {
    const bool behind = answered;
    ReplayedStep& step = later->second;
    answered = answered || step.settled.plan.has_value();
    if (staleness == 0 ? answered : behind) step.settled.updated = true;
  }
}

}  // namespace

void LayerPipeline::FinishReplay() {
  bool work = false;
  {
    MutexLock lock(mu_);
    LayerReplay::Outcome outcome = replay().Finish(began_);
    replay_.reset();
    began_ = outcome.began;
    GiveUpUnlogged(static_cast<uint64_t>(session_->spec.staleness_steps), outcome.steps);
    std::vector<SettledStep> settled;
    for (auto& [step, replayed] : outcome.steps) {
      std::vector<ResultFn> nobody;
      StepSlot& slot = OpenSlot(step, replayed.settled.mode, nobody);
      slot.restored = true;
      slot.plan = replayed.settled.plan;
      if (replayed.settled.updated) slot.statistics.Advance(PhaseEvent::kSeal);
      if (replayed.votes.has_value()) {
        slot.restored_votes = replayed.failed ? std::vector<Vote>() : *std::move(replayed.votes);
        if (!slot.restored_votes->empty()) ++restored_updates_;
        ++slot.in_flight;
        session_->shard->in_flight.fetch_add(1, std::memory_order_relaxed);
        replayed.settled.updated = false;
        work = true;
      } else if (replayed.settled.updated) {
        slot.statistics.Advance(PhaseEvent::kApply);
      }
      stats_.last_sealed_step = std::max(stats_.last_sealed_step, step);
      if (session_->last_step.load() < step) session_->last_step.store(step);
      settled.push_back(std::move(replayed.settled));
    }
    journal_.Resume(outcome.began, outcome.updates, outcome.release, std::move(settled));
    released_ = std::move(outcome.released);
    Show(worker_.view());
  }
  if (work) Schedule();
}

// Whoever sends a later step's gradient has this one's answer, or had sent this one again before.
bool LayerPipeline::PassedOver(const StepSlot& slot) const {
  if (!slot.restored) return false;
  for (auto later = slots_.upper_bound(slot.step); later != slots_.end(); ++later) {
    if (later->second->gradient.state != PhaseState::kOpen) return true;
  }
  return false;
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// A layer whose shard was lost: it goes on here without factors until those that the lost shard had are there.
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/core/layer_pipeline.h"

namespace precondor {

void LayerPipeline::Await() {
  awaits_ = true;
  worker_.set_awaits(true);
}

bool LayerPipeline::awaits() const {
  MutexLock lock(mu_);
  return awaits_;
}

void LayerPipeline::BeginAwaiting() {
  executor_.Post(strand_, [self = shared_from_this()] {
    self->journal_.FactorsChanged(/*held=*/false, kAwaitedRelease);
    self->Run();
  });
}

std::optional<uint64_t> LayerPipeline::BeginTakeover() {
  MutexLock lock(mu_);
  if (!awaits_ || ticket_ != 0) return std::nullopt;
  return ticket_ = ++last_ticket_;
}

void LayerPipeline::EndTakeover(uint64_t ticket) {
  MutexLock lock(mu_);
  if (ticket_ == ticket) ticket_ = 0;
}

bool LayerPipeline::Wants(uint64_t ticket) const {
  MutexLock lock(mu_);
  return awaits_ && ticket == ticket_;
}

void LayerPipeline::StopTakeover() {
  {
    MutexLock lock(mu_);
    if (!awaits_) return;
    ticket_ = 0;
  }
  aside_.Take();
  journal_.FactorsChanged(/*held=*/false, kAwaitedRelease);
}

LayerWorker::UpdateOutcome LayerPipeline::Apply(uint64_t step, std::vector<Vote> votes) {
  if (!awaits()) {
    if (!journal_.inherited(step)) return worker_.Update(std::move(votes));
  } else if (!aside_.Add({.step = step, .votes = std::move(votes)})) {
    NoteLost(1, "more came than can be put aside while the layer awaits its factors");
  }
  LayerWorker::UpdateOutcome outcome;
  outcome.state = worker_.view();
  return outcome;
}

void LayerPipeline::NoteLost(uint64_t updates, absl::string_view why) const {
  session_->shard->observer.OnUpdatesLost(session_->spec.name, static_cast<int64_t>(updates));
  session_->shard->logger.Log(Severity::kWarning, "factor updates are lost",
                              {{"session", session_->spec.name},
                               {"layer", session_->spec.layers[layer_].name},
                               {"updates", updates},
                               {"reason", why}});
}

void LayerPipeline::TakeOver(uint64_t ticket, PeerFactorState factors, uint64_t release) {
  // Tasks have to be copyable.
  auto next = std::make_shared<PeerFactorState>(std::move(factors));
  executor_.Post(strand_, [self = shared_from_this(), next, ticket, release] {
    if (!self->Wants(ticket)) return;
    for (Work& work : self->TakeRestoredUpdates()) self->Update(work);
    const uint64_t version = next->state->version();
    uint64_t lost = 0;
    uint64_t inherited_before = 0;
    {
      MutexLock lock(self->mu_);
      self->awaits_ = false;
      self->ticket_ = 0;
      if (self->awaited_version_ > version) lost = self->awaited_version_ - version;
      self->awaited_version_ = 0;
      // Where the job has gone back since, its steps come anew.
      if (next->began == self->began_) inherited_before = next->next_update;
    }
    self->worker_.set_awaits(false);
    self->ReplaceState(std::move(next->state), release, inherited_before);
    // Their records came before, and so they are part of what a replay comes to.
    for (AsideUpdates::Update& update : self->aside_.Take()) {
      if (update.step < inherited_before) continue;
      self->NoteUpdate(update.step, self->worker_.Update(std::move(update.votes)), /*restored=*/false);
    }
    if (lost > 0) self->NoteLost(lost, absl::StrCat("the factors that were taken over are of version ", version));
  });
}

}  // namespace precondor

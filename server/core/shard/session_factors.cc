// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/session_factors.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/api/shard_journal.h"

namespace precondor {

SessionFactors::SessionFactors(std::shared_ptr<SessionContext> context,
                               std::vector<std::shared_ptr<LayerDriver>> layers, const Sizes& sizes, bool held)
    : context_(std::move(context)),
      layers_(std::move(layers)),
      sizes_(sizes),
      held_(held),
      reserved_(held ? sizes.held : sizes.released) {}

bool SessionFactors::held() const {
  MutexLock lock(mu_);
  return held_;
}

int64_t SessionFactors::reserved_bytes() const {
  MutexLock lock(mu_);
  return reserved_.total();
}

DeviceBytes SessionFactors::Close() {
  MutexLock lock(mu_);
  closed_ = true;
  return std::exchange(reserved_, NoBytes());
}

void SessionFactors::ReportMemory(int64_t reserved_bytes) const {
  context_->shard->observer.OnSessionMemory(context_->spec.name, reserved_bytes);
}

// --- a return to second order ---------------------------------------------------------------------------------------

absl::StatusOr<SessionFactors::Returned> SessionFactors::MakeState(LayerDriver& layer) const {
  ShardContext& shard = *context_->shard;
  const uint64_t eviction_id = layer.factors().eviction_id();
  Returned returned{.layer = &layer, .state = nullptr, .eviction_id = 0};
  PRECONDOR_ASSIGN_OR_RETURN(returned.state, context_->MakeState(layer.index()));
  if (eviction_id == 0 || shard.options.journal == nullptr) return returned;
  absl::StatusOr<std::string> kept =
      shard.options.journal->ReadFactors(context_->session_id, eviction_id, layer.index());
  const absl::Status status = kept.ok() ? returned.state->Load(*kept) : kept.status();
  if (status.ok()) {
    returned.eviction_id = eviction_id;
    return returned;
  }
  shard.logger.Log(Severity::kError, "factors of a layer are lost",
                   {{"session", context_->spec.name},
                    {"layer", layer.spec().name},
                    {"reason", absl::string_view(status.message())}});
  // The failed Load may have changed part of the state.
  PRECONDOR_ASSIGN_OR_RETURN(returned.state, context_->MakeState(layer.index()));
  return returned;
}

absl::StatusOr<std::vector<SessionFactors::Returned>> SessionFactors::MakeStates() const {
  std::vector<Returned> states;
  for (const std::shared_ptr<LayerDriver>& layer : layers_) {
    PRECONDOR_ASSIGN_OR_RETURN(states.emplace_back(), MakeState(*layer));
  }
  return states;
}

void SessionFactors::Give(std::vector<Returned> states) const {
  if (states.empty()) return;
  int64_t kept = 0, fresh = 0;
  for (Returned& one : states) {
    ++(one.eviction_id != 0 ? kept : fresh);
    one.layer->factors().Set(std::move(one.state), one.eviction_id);
  }
  const ShardContext& shard = *context_->shard;
  shard.observer.OnFactorsReturned(context_->spec.name, kept, fresh);
  shard.logger.Log(fresh == 0 ? Severity::kInfo : Severity::kWarning,
                   fresh == 0 ? "factors are back as they were released" : "factors begin anew",
                   {{"session", context_->spec.name}, {"kept_layers", kept}, {"fresh_layers", fresh}});
}

absl::Status SessionFactors::Hold(HoldVersion version) {
  DeviceBytes more;
  {
    MutexLock lock(mu_);
    if (closed_ || version <= version_) return absl::OkStatus();
    if (held_) {
      version_ = version;
      return absl::OkStatus();
    }
    if (holding_ || evicting_) {
      return absl::UnavailableError(
          absl::StrCat("session \"", context_->spec.name, "\": its factors are being changed already"));
    }
    holding_ = true;
    // Memory that has not been released yet is used again.
    more = writing_ != 0 ? NoBytes() : factor_bytes();
  }
  const auto done = absl::MakeCleanup([this] {
    MutexLock lock(mu_);
    holding_ = false;
  });
  MemoryAccount& memory = context_->shard->memory;
  PRECONDOR_RETURN_IF_ERROR(memory.Reserve(context_->spec.name, more));
  absl::StatusOr<std::vector<Returned>> states = MakeStates();
  int64_t reserved = 0;
  bool wanted = states.ok();
  {
    MutexLock lock(mu_);
    wanted = wanted && !closed_ && version > version_;
    if (wanted) {
      version_ = version;
      held_ = true;
      writing_ = 0;
      reserved = (reserved_ += more).total();
    }
  }
  if (!wanted) {
    memory.Release(more);
    return states.status();
  }
  Give(*std::move(states));
  ReportMemory(reserved);
  return absl::OkStatus();
}

// --- release --------------------------------------------------------------------------------------------------------

void SessionFactors::Release(HoldVersion version) {
  uint64_t eviction_id = 0;
  {
    MutexLock lock(mu_);
    if (closed_ || version <= version_) return;
    version_ = version;
    if (!held_) return;
    held_ = false;
    eviction_id = NextEvictionId();
    evicting_ = context_->shard->options.journal != nullptr;
  }
  Evict(eviction_id, /*reserved=*/true);
}

uint64_t SessionFactors::NextEvictionId() {
  const int64_t now = absl::ToUnixNanos(context_->shard->clock.Wall());
  return eviction_id_ = std::max(eviction_id_ + 1, static_cast<uint64_t>(std::max<int64_t>(now, 0)));
}

void SessionFactors::Evict(uint64_t eviction_id, bool reserved) {
  auto leaving = std::make_shared<EvictionBatch>();
  leaving->reserved = reserved;
  {
    MutexLock lock(leaving->mu);
    leaving->factors = {.session_id = context_->session_id, .eviction_id = eviction_id, .states = {}};
    leaving->left = layers_.size();
  }
  for (const std::shared_ptr<LayerDriver>& layer : layers_) {
    layer->factors().Release(eviction_id,
                             [self = shared_from_this(), layer, leaving](absl::StatusOr<std::string> state) {
                               self->OnEvicted(*layer, *leaving, std::move(state));
                             });
  }
}

void SessionFactors::OnEvicted(const LayerDriver& layer, EvictionBatch& leaving, absl::StatusOr<std::string> state) {
  if (!state.ok() && !absl::IsNotFound(state.status())) {
    context_->shard->logger.Log(Severity::kError, "factors of a layer are lost",
                                {{"session", context_->spec.name},
                                 {"layer", layer.spec().name},
                                 {"reason", absl::string_view(state.status().message())}});
  }
  ReleasedFactors all;
  {
    MutexLock lock(leaving.mu);
    if (state.ok()) leaving.factors.states.emplace(layer.index(), *std::move(state));
    if (--leaving.left > 0) return;
    all = std::move(leaving.factors);
  }
  Keep(std::move(all), leaving.reserved);
}

void SessionFactors::Keep(ReleasedFactors factors, bool reserved) {
  ShardJournal* const journal = context_->shard->options.journal;
  if (journal == nullptr) {
    if (reserved) FinishRelease();
    return;
  }
  const uint64_t eviction_id = factors.eviction_id;
  if (!factors.states.empty()) journal->KeepFactors(std::move(factors));
  {
    MutexLock lock(mu_);
    evicting_ = false;
    if (reserved) writing_ = eviction_id;
  }
  FreeReleased();
}

void SessionFactors::FreeReleased() {
  uint64_t eviction_id = 0;
  {
    MutexLock lock(mu_);
    if (writing_ == 0 || holding_ || closed_) return;
    eviction_id = writing_;
  }
  if (!context_->shard->options.journal->FactorsDurable(context_->session_id, eviction_id)) return;
  {
    MutexLock lock(mu_);
    if (writing_ != eviction_id || holding_ || closed_) return;
    writing_ = 0;
  }
  FinishRelease();
}

void SessionFactors::FinishRelease() {
  for (const std::unique_ptr<SessionDevice>& device : context_->devices) {
    device->statistics_scratch.Trim();
    device->gradient_scratch.Trim();
  }
  int64_t reserved = 0;
  {
    MutexLock lock(mu_);
    if (closed_) return;
    reserved = (reserved_ -= factor_bytes()).total();
  }
  ShardContext& shard = *context_->shard;
  for (const std::unique_ptr<SessionDevice>& device : context_->devices) device->backend.Trim();
  shard.memory.Release(factor_bytes());
  ReportMemory(reserved);
  if (shard.options.trim_memory) shard.options.trim_memory();
  shard.logger.Log(
      Severity::kInfo, "factors released",
      {{"session", context_->spec.name}, {"released_bytes", factor_bytes().total()}, {"reserved_bytes", reserved}});
}

// --- replay ---------------------------------------------------------------------------------------------------------

uint64_t SessionFactors::KeepReplayed(std::map<uint32_t, std::string> released) const {
  uint64_t eviction_id = 0;
  for (const std::shared_ptr<LayerDriver>& layer : layers_) {
    if (released.contains(layer->index())) eviction_id = layer->factors().eviction_id();
  }
  if (eviction_id == 0) return 0;
  context_->shard->options.journal->KeepFactors(
      {.session_id = context_->session_id, .eviction_id = eviction_id, .states = std::move(released)});
  return eviction_id;
}

bool SessionFactors::CompleteReplay() {
  std::vector<Returned> states;
  for (const std::shared_ptr<LayerDriver>& layer : layers_) {
    if (layer->factors().held()) continue;
    absl::StatusOr<Returned> state = MakeState(*layer);
    if (!state.ok()) return false;
    states.push_back(*std::move(state));
  }
  Give(std::move(states));
  return true;
}

void SessionFactors::FinishReplay(std::map<uint32_t, std::string> released) {
  MemoryAccount& memory = context_->shard->memory;
  const uint64_t kept = KeepReplayed(std::move(released));
  const bool there =
      std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->factors().held(); });
  bool reserved = false;
  {
    MutexLock lock(mu_);
    reserved = held_;
    for (const auto& layer : layers_) eviction_id_ = std::max(eviction_id_, layer->factors().eviction_id());
  }
  if (!reserved && (there || kept != 0)) reserved = memory.Reserve(context_->spec.name, factor_bytes()).ok();
  const bool held = there && reserved && CompleteReplay();
  const bool leaves = there && !held;
  if (reserved && !held && !leaves && kept == 0) {
    memory.Release(factor_bytes());
    reserved = false;
  }
  uint64_t eviction_id = 0;
  {
    MutexLock lock(mu_);
    held_ = held;
    reserved_ = reserved ? sizes_.held : sizes_.released;
    if (leaves) {
      eviction_id = NextEvictionId();
      evicting_ = true;
    } else if (reserved && !held) {
      writing_ = kept;
    }
  }
  if (leaves) return Evict(eviction_id, reserved);
  FreeReleased();
}

}  // namespace precondor

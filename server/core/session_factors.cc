// SPDX-License-Identifier: Apache-2.0
#include "server/core/session_factors.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

SessionFactors::SessionFactors(std::shared_ptr<SessionContext> context,
                               std::vector<std::shared_ptr<LayerPipeline>> layers, Sizes sizes, bool held,
                               uint64_t version)
    : context_(std::move(context)),
      layers_(std::move(layers)),
      sizes_(sizes),
      held_(held),
      reserved_(held ? sizes.held : sizes.released),
      version_(version) {}

absl::StatusOr<SessionFactors::Standing> SessionFactors::standing() const {
  MutexLock lock(mu_);
  if (!holding_ && !closed_) return Standing{.held = held_, .reserved = reserved_, .version = version_};
  return absl::UnavailableError(absl::StrCat("session \"", context_->spec.name, "\": its factors are being changed"));
}

bool SessionFactors::HandOver(const Standing& expected) {
  MutexLock lock(mu_);
  const bool as_expected = Standing{.held = held_, .reserved = reserved_, .version = version_} == expected;
  if (closed_ || holding_ || !as_expected) return false;
  closed_ = true;
  reserved_ = 0;
  return true;
}

bool SessionFactors::held() const {
  MutexLock lock(mu_);
  return held_;
}

int64_t SessionFactors::reserved_bytes() const {
  MutexLock lock(mu_);
  return reserved_;
}

int64_t SessionFactors::Close() {
  MutexLock lock(mu_);
  closed_ = true;
  return std::exchange(reserved_, 0);
}

void SessionFactors::Tell(int64_t reserved_bytes) const {
  context_->shard->observer.OnSessionMemory(context_->spec.name, reserved_bytes);
}

absl::StatusOr<std::vector<std::unique_ptr<LayerState>>> SessionFactors::MakeStates() const {
  std::vector<std::unique_ptr<LayerState>> states;
  for (const std::shared_ptr<LayerPipeline>& layer : layers_) {
    PRECONDOR_ASSIGN_OR_RETURN(states.emplace_back(),
                               context_->method->MakeState(layer->spec(), context_->shard->backend));
  }
  return states;
}

absl::Status SessionFactors::Hold(uint64_t version) {
  {
    MutexLock lock(mu_);
    if (closed_ || version <= version_) return absl::OkStatus();
    if (held_) {
      version_ = version;
      return absl::OkStatus();
    }
    if (holding_) {
      return absl::UnavailableError(
          absl::StrCat("session \"", context_->spec.name, "\": its factors are being made already"));
    }
    holding_ = true;
  }
  const auto done = absl::MakeCleanup([this] {
    MutexLock lock(mu_);
    holding_ = false;
  });
  MemoryAccount& memory = context_->shard->memory;
  PRECONDOR_RETURN_IF_ERROR(memory.Reserve(context_->spec.name, factor_bytes()));
  absl::StatusOr<std::vector<std::unique_ptr<LayerState>>> states = MakeStates();
  int64_t reserved = 0;
  bool wanted = states.ok();
  {
    MutexLock lock(mu_);
    wanted = wanted && !closed_ && version > version_;
    if (wanted) {
      version_ = version;
      held_ = true;
      reserved = reserved_ += factor_bytes();
    }
  }
  if (!wanted) {
    memory.Release(factor_bytes());
    return states.status();
  }
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i]->SetState(std::move((*states)[i]), [] {});
  Tell(reserved);
  context_->shard->logger.Log(Severity::kInfo, "factors begin anew",
                              {{"session", context_->spec.name}, {"reserved_bytes", reserved}});
  return absl::OkStatus();
}

void SessionFactors::Release(uint64_t version) {
  {
    MutexLock lock(mu_);
    if (closed_ || version <= version_) return;
    version_ = version;
    if (!held_) return;
    held_ = false;
  }
  auto left = std::make_shared<std::atomic<size_t>>(layers_.size());
  for (const std::shared_ptr<LayerPipeline>& layer : layers_) {
    layer->SetState(nullptr, [self = shared_from_this(), left] {
      if (left->fetch_sub(1) == 1) self->FinishRelease();
    });
  }
}

void SessionFactors::FinishReplay() {
  MemoryAccount& memory = context_->shard->memory;
  bool held = std::all_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->has_factors(); });
  bool was_held = false;
  {
    MutexLock lock(mu_);
    was_held = held_;
  }
  if (held && !was_held) held = memory.Reserve(context_->spec.name, factor_bytes()).ok();
  if (!held) {
    for (const auto& layer : layers_) {
      if (layer->has_factors()) layer->SetState(nullptr, [] {});
    }
    if (was_held) memory.Release(factor_bytes());
  }
  MutexLock lock(mu_);
  held_ = held;
  reserved_ = held ? sizes_.held : sizes_.released;
}

void SessionFactors::FinishRelease() {
  context_->statistics_scratch.Trim();
  context_->gradient_scratch.Trim();
  int64_t reserved = 0;
  {
    MutexLock lock(mu_);
    if (closed_) return;
    reserved = reserved_ -= factor_bytes();
  }
  ShardContext& shard = *context_->shard;
  shard.backend.Trim();
  shard.memory.Release(factor_bytes());
  Tell(reserved);
  if (shard.options.trim_memory) shard.options.trim_memory();
  shard.logger.Log(
      Severity::kInfo, "factors released",
      {{"session", context_->spec.name}, {"released_bytes", factor_bytes()}, {"reserved_bytes", reserved}});
}

}  // namespace precondor

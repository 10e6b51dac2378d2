// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/session_factors.h"

#include <atomic>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

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
  return reserved_;
}

int64_t SessionFactors::Close() {
  MutexLock lock(mu_);
  closed_ = true;
  return std::exchange(reserved_, 0);
}

void SessionFactors::ReportMemory(int64_t reserved_bytes) const {
  context_->shard->observer.OnSessionMemory(context_->spec.name, reserved_bytes);
}

absl::Status SessionFactors::GiveFresh() const {
  std::vector<std::unique_ptr<LayerState>> states;
  for (const std::shared_ptr<LayerDriver>& layer : layers_) {
    PRECONDOR_ASSIGN_OR_RETURN(states.emplace_back(), layer->MakeFactors());
  }
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i]->ReplaceFactors(std::move(states[i]));
  return absl::OkStatus();
}

absl::Status SessionFactors::Hold(HoldVersion version) {
  {
    MutexLock lock(mu_);
    if (closed_ || version <= version_) return absl::OkStatus();
    if (held_) {
      version_ = version;
      return absl::OkStatus();
    }
    if (changing()) {
      return absl::UnavailableError(
          absl::StrCat("session \"", context_->spec.name, "\": its factors are being changed already"));
    }
    holding_ = true;
  }
  const auto done = absl::MakeCleanup([this] {
    MutexLock lock(mu_);
    holding_ = false;
  });
  MemoryAccount& memory = context_->shard->memory;
  PRECONDOR_RETURN_IF_ERROR(memory.Reserve(context_->spec.name, factor_bytes()));
  if (absl::Status given = GiveFresh(); !given.ok()) {
    memory.Release(factor_bytes());
    return given;
  }
  int64_t reserved = 0;
  bool ended = false, superseded = false;
  {
    MutexLock lock(mu_);
    ended = closed_;
    superseded = !ended && version <= version_;
    if (!ended) {
      held_ = !superseded;
      releasing_ = superseded;
      reserved = reserved_ += factor_bytes();
    }
    if (held_) version_ = version;
  }
  if (ended) {
    memory.Release(factor_bytes());
    return absl::OkStatus();
  }
  if (superseded) {
    Drop();
    return absl::OkStatus();
  }
  ReportMemory(reserved);
  context_->shard->logger.Log(Severity::kInfo, "factors begin anew",
                              {{"session", context_->spec.name}, {"layers", static_cast<uint64_t>(layers_.size())}});
  return absl::OkStatus();
}

void SessionFactors::Release(HoldVersion version) {
  {
    MutexLock lock(mu_);
    if (closed_ || version <= version_) return;
    version_ = version;
    if (!held_) return;
    held_ = false;
    releasing_ = true;
  }
  Drop();
}

void SessionFactors::Drop() {
  const auto left = std::make_shared<std::atomic<size_t>>(layers_.size());
  for (const std::shared_ptr<LayerDriver>& layer : layers_) {
    layer->ReplaceFactors(nullptr, [self = shared_from_this(), left] {
      if (--*left == 0) self->FinishRelease();
    });
  }
  if (layers_.empty()) FinishRelease();
}

void SessionFactors::FinishRelease() {
  context_->Trim();
  int64_t reserved = 0;
  {
    MutexLock lock(mu_);
    releasing_ = false;
    if (closed_) return;
    reserved = reserved_ -= factor_bytes();
  }
  ShardContext& shard = *context_->shard;
  shard.memory.Release(factor_bytes());
  ReportMemory(reserved);
  if (shard.options.trim_memory) shard.options.trim_memory();
  shard.logger.Log(
      Severity::kInfo, "factors released",
      {{"session", context_->spec.name}, {"released_bytes", factor_bytes()}, {"reserved_bytes", reserved}});
}

void SessionFactors::FinishReplay() {
  Layers without;
  absl::c_copy_if(layers_, std::back_inserter(without), [](const auto& layer) { return !layer->has_factors(); });
  const bool holds = without.size() < layers_.size();
  bool reserved = false;
  {
    MutexLock lock(mu_);
    reserved = std::exchange(held_, holds);
    reserved_ = holds ? sizes_.held : sizes_.released;
  }
  if (holds && !reserved) context_->shard->memory.ReserveUsed(factor_bytes());
  if (!holds && reserved) context_->shard->memory.Release(factor_bytes());
  if (!holds || without.empty()) return;
  context_->shard->logger.Log(Severity::kWarning,
                              "the shard ended while factors were dropped or made: all layers drop theirs",
                              {{"session", context_->spec.name}, {"layers", static_cast<uint64_t>(layers_.size())}});
  {
    MutexLock lock(mu_);
    held_ = false;
    releasing_ = true;
  }
  Drop();
}

}  // namespace precondor

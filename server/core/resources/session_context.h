// SPDX-License-Identifier: Apache-2.0
// State that the layers of one session share. It is held by shared_ptr because work on an executor can outlive the
// session.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/registry.h"
#include "server/core/api/executor.h"
#include "server/core/api/session_access.h"
#include "server/core/resources/memory_pools.h"
#include "server/core/resources/reservation.h"
#include "server/core/resources/shard_context.h"

namespace precondor {

// Tracks the greatest step that has begun in one session on a shard. A rollback of the job sets it back.
// Thread-safe. Layers enter a new epoch one after the other, so a step that began before the last rollback can be
// reported after it. Such reports are ignored.
class BegunSteps {
 public:
  struct Last {
    uint64_t step = 0;  // greatest step that has begun since the last rollback; 0 until one has
    Mode mode = Mode::kSecondOrder;
  };

  // Notes that the job continues from `step` in epoch `rollback_epoch`. Does nothing unless that epoch is later than
  // the one of every earlier rollback.
  void RollBack(uint64_t rollback_epoch, uint64_t step) {
    MutexLock lock(mu_);
    if (rollback_epoch <= rollback_epoch_) return;
    rollback_epoch_ = rollback_epoch;
    rollback_step_ = step;
    last_.step = step == 0 ? 0 : step - 1;
  }

  // Notes that `step` has begun in `mode`. `rollback_epoch` is the epoch of the last rollback before the step began, or
  // 0 if there was none.
  void Begin(uint64_t rollback_epoch, uint64_t step, Mode mode) {
    MutexLock lock(mu_);
    if (rollback_epoch < rollback_epoch_ || step < last_.step) return;
    last_ = {.step = step, .mode = mode};
  }

  // Returns the step from which the job continued after the last rollback; 0 if there was none.
  uint64_t rollback_step() const {
    MutexLock lock(mu_);
    return rollback_step_;
  }

  Last last() const {
    MutexLock lock(mu_);
    return last_;
  }

 private:
  mutable Mutex mu_;
  uint64_t rollback_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t rollback_step_ ABSL_GUARDED_BY(mu_) = 0;
  Last last_ ABSL_GUARDED_BY(mu_);
};

// Which layers of a session a client has restored, and whether the coordinator has ordered that. Thread-safe.
class RestoredLayers {
 public:
  explicit RestoredLayers(size_t layers) : layers_(layers) {}
  enum class State : uint8_t { kFresh, kLoading, kRestored };
  // Returns the state, which becomes kLoading if it was kFresh. A layer is restored once.
  State Claim(uint32_t layer) {
    State state = State::kFresh;
    layers_[layer].compare_exchange_strong(state, State::kLoading);
    return state;
  }
  // Ends a claim.
  void Set(uint32_t layer, State state) { layers_[layer] = state; }
  bool Has(uint32_t layer) const { return layers_[layer] == State::kRestored; }

  std::atomic<bool> ordered = false;  // since this process has the session

 private:
  std::vector<std::atomic<State>> layers_;
};

// One per session. Constant after construction, except the pools and begun_steps, which are thread-safe, and the
// atomics.
struct SessionContext {
  // Frees the scratch memory and the memory that the backend caches: sessions with other shapes cannot reuse it.
  ~SessionContext() {
    statistics_scratch.Trim();
    gradient_scratch.Trim();
    shard->backend.Trim();
  }
  // Returns fresh factors, or the errors of Method::MakeState.
  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(uint32_t layer) const {
    return methods.of(layer).MakeState(spec.layers[layer], shard->backend);
  }

  std::shared_ptr<ShardContext> shard;
  uint64_t session_id = 0;
  int layers_at_once = 1;  // see Reservation
  // From ShardSessions::NextGeneration; 0 unless the session had been on the shard before and was removed.
  uint64_t state_generation = 0;
  SessionSpec spec;
  MethodSet methods;
  SessionAccess access;
  ScratchPool statistics_scratch;  // see StatisticsScratchElements
  ScratchPool gradient_scratch;    // see GradientScratchElements: D, then U
  RestoredLayers restored_layers;
  const std::shared_ptr<PayloadPool> payloads = std::make_shared<PayloadPool>(MostKeptBytes(spec));
  // Whether an answer to a FETCH is in memory, where workers keep no factors. Shared with that answer, which can
  // outlive the session and the backend.
  const std::shared_ptr<std::atomic<bool>> fetching = std::make_shared<std::atomic<bool>>(false);
  BegunSteps begun_steps = {};
  std::atomic<uint64_t> updates_lost = 0;  // of all layers, as ranks have reported
  // Step of the last snapshot that an operator or the coordinator requested, besides those at regular intervals; 0:
  // none.
  std::atomic<uint64_t> snapshot_at = 0;
};

}  // namespace precondor

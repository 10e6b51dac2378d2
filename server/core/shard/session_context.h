// SPDX-License-Identifier: Apache-2.0
// What the layers of one session share. Held by shared_ptr, because work on an executor may outlive the session.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/check.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/executor.h"
#include "server/core/reservation.h"
#include "server/core/scratch_pool.h"
#include "server/core/session_access.h"
#include "server/core/shard/begun_steps.h"
#include "server/core/shard/shard_context.h"

namespace precondor {

// One of the shard's devices, and what a session has there that its layers share.
struct SessionDevice {
  size_t place = 0;  // among the shard's
  Backend& backend;
  Executor& executor;
  ScratchPool statistics_scratch;  // StatisticsScratchElements
  ScratchPool gradient_scratch;    // GradientScratchElements: D, then U
};

// Where the layers of a session are. Thread-safe.
class DeviceOfLayer {
 public:
  explicit DeviceOfLayer(size_t layers) : places_(layers) {}
  // False, and nothing has changed: the layer stays on another device.
  bool Set(uint32_t layer, size_t device) {
    uint32_t none = 0;
    const auto place = static_cast<uint32_t>(device) + 1;
    return places_[layer].compare_exchange_strong(none, place) || none == place;
  }
  // -1: on none so far.
  int Of(uint32_t layer) const { return static_cast<int>(places_[layer].load()) - 1; }

 private:
  std::vector<std::atomic<uint32_t>> places_;  // plus one
};

// One per session. Const after construction but for the pools and begun_steps, which lock, and the atomics.
struct SessionContext {
  // Its layers are gone: gives their memory back, which a session of other shapes could not use.
  ~SessionContext() {
    std::vector<Backend*> backends;
    for (const std::unique_ptr<SessionDevice>& device : devices) backends.push_back(&device->backend);
    devices.clear();
    for (Backend* const backend : backends) backend->Trim();
  }

  // Of a layer that has been given one.
  SessionDevice& DeviceOf(uint32_t layer) const {
    const int place = device_of_layer.Of(layer);
    PRECONDOR_CHECK(place >= 0);
    return *devices[static_cast<size_t>(place)];
  }
  // Fresh factors, on the layer's device or, of a layer that is split, on all. Errors: those of Method::MakeState.
  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(uint32_t layer) const {
    const Method& method = methods.of(layer);
    const SessionDevice& device = DeviceOf(layer);
    if (!IsSplit(layer)) return method.MakeState(spec.layers[layer], device.backend);
    return method.MakeSplitState(spec.layers[layer], *shard->options.group, static_cast<int>(device.place));
  }
  bool IsSplit(uint32_t layer) const {
    return precondor::IsSplit(methods.of(layer), spec.layers[layer], shard->ranks());
  }

  std::shared_ptr<ShardContext> shard;
  uint64_t session_id = 0;
  uint64_t state_generation = 0;  // the shard's, when the session came; 0 unless it had been here and was removed
  SessionSpec spec;
  MethodSet methods;
  SessionAccess access;
  std::vector<std::unique_ptr<SessionDevice>> devices;  // as the shard has them
  DeviceOfLayer device_of_layer;
  std::atomic<int64_t> installed_ns = 0;  // last, by the coordinator, on the monotonic clock; 0: not since the start
  BegunSteps begun_steps = {};
  std::atomic<uint64_t> snapshot_at = 0;  // that an operator or the coordinator asked for, besides the regular ones
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_layers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/resources/placement_input.h"
#include "server/core/resources/reservation.h"
#include "server/core/shard/shard_session.h"

namespace precondor {

namespace {

SessionFactors::Sizes FactorSizes(const ShardContext& shard, const SessionSpec& spec, const MethodSet& methods,
                                  const LayersOfDevices& layers) {
  const int window = shard.options.window_steps;
  std::vector<int> parallelism;
  for (const ShardDevice& device : shard.devices) parallelism.push_back(device.executor.parallelism());
  ReservationSums held(spec, methods, window, parallelism);
  for (size_t device = 0; device < layers.size(); ++device) {
    for (const uint32_t layer : layers[device]) held.Include(device, layer);
  }
  SessionFactors::Sizes sizes;
  for (size_t device = 0; device < layers.size(); ++device) {
    sizes.held.of.push_back(held.reservation(device).total());
    sizes.released.of.push_back(
        ComputeFirstOrderReservation(spec, layers[device], window, parallelism[device]).total());
  }
  return sizes;
}

// Adds the cost of the session's layers to their devices' loads.
void AddLoad(const ShardSession& session, std::vector<AssignmentDevice>& devices) {
  const SessionContext& context = session.context();
  const std::vector<PlacementLayer> estimates = EstimateLayers(context.spec, context.methods);
  for (uint32_t layer = 0; layer < estimates.size(); ++layer) {
    if (session.layer(layer) == nullptr) continue;
    devices[context.DeviceOf(layer).place].load += estimates[layer].cost;
  }
}

// `taken` has the bytes that other sessions have reserved, by device.
LayersOfDevices Assign(const ShardContext& shard, const ShardSessions& sessions, const SessionInstall& install,
                       const MethodSet& methods, const DeviceBytes& taken) {
  std::vector<AssignmentDevice> devices;
  for (size_t i = 0; i < taken.of.size(); ++i) {
    devices.push_back(
        {.free_bytes = shard.memory.capacity() - taken.of[i], .parallelism = shard.devices[i].executor.parallelism()});
  }
  if (devices.size() > 1) {
    for (const std::shared_ptr<ShardSession>& session : sessions.All()) {
      AddLoad(*session, devices);
    }
  }
  return AssignDevices(install.spec, methods, install.layers, shard.options.window_steps, devices);
}

}  // namespace

std::vector<std::unique_ptr<SessionDevice>> MakeSessionDevices(const ShardContext& shard) {
  std::vector<std::unique_ptr<SessionDevice>> devices;
  for (const ShardDevice& device : shard.devices) {
    devices.emplace_back(new SessionDevice{.place = devices.size(),
                                           .backend = device.backend,
                                           .executor = device.executor,
                                           .statistics_scratch = ScratchPool(device.backend),
                                           .gradient_scratch = ScratchPool(device.backend)});
  }
  return devices;
}

void GiveDevices(SessionContext& session, const LayersOfDevices& layers) {
  for (size_t device = 0; device < layers.size(); ++device) {
    int64_t statistics = 0, gradient = 0;
    for (const uint32_t layer : layers[device]) {
      session.device_of_layer[layer] = static_cast<int>(device);
      statistics = std::max(statistics, StatisticsScratchElements(session.spec, layer));
      gradient = std::max(gradient, GradientScratchElements(session.spec, layer));
    }
    // Must agree with ReservationSums.
    SessionDevice& has = *session.devices[device];
    const bool all_at_once = static_cast<int64_t>(layers[device].size()) <= has.executor.parallelism();
    has.statistics_scratch.SetBlockElements(all_at_once ? 0 : statistics);
    has.gradient_scratch.SetBlockElements(all_at_once ? 0 : gradient);
  }
}

absl::StatusOr<LayerReservation> MakeRoom(ShardContext& shard, const ShardSessions& sessions,
                                          const SessionInstall& install, const MethodSet& methods) {
  for (;;) {
    const DeviceBytes before = shard.memory.reserved();
    LayerReservation room;
    room.layers = Assign(shard, sessions, install, methods, before);
    room.sizes = FactorSizes(shard, install.spec, methods, room.layers);
    room.bytes = install.factors_released ? room.sizes.released : room.sizes.held;
    const absl::Status status = shard.memory.Reserve(install.spec.name, room.bytes);
    if (status.ok()) return room;
    // Another session may have reserved this room meanwhile; other devices may still have some.
    if (shard.devices.size() == 1 || shard.memory.reserved() == before) return status;
  }
}

}  // namespace precondor

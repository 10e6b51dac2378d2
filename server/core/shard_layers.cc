// SPDX-License-Identifier: Apache-2.0
// A session's layers on a shard, and how they become others.
#include "server/core/shard_layers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/placement_input.h"
#include "server/core/reservation.h"
#include "server/core/shard.h"
#include "server/core/shard_session.h"

namespace precondor {

namespace {

SessionFactors::Sizes FactorSizes(const ShardContext& shard, const SessionSpec& spec, const MethodSet& methods,
                                  const LayersOfDevices& layers) {
  const int window = shard.options.window_steps;
  std::vector<int> parallelism;
  for (const ShardDevice& device : shard.devices) parallelism.push_back(device.executor.parallelism());
  ReservationSums held(spec, methods, window, parallelism, shard.ranks());
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

// Adds the cost of the session's layers to their devices' loads; those that are split are the same to all.
void AddLoad(const ShardSession& session, absl::Span<const MeasuredCost> costs,
             std::vector<AssignmentDevice>& devices) {
  const SessionContext& context = session.context();
  const std::vector<PlacementLayer> estimates = EstimateLayers(context.spec, context.methods, costs);
  for (uint32_t layer = 0; layer < estimates.size(); ++layer) {
    if (session.layer(layer) == nullptr || context.IsSplit(layer)) continue;
    devices[context.DeviceOf(layer).place].load += estimates[layer].cost;
  }
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

bool GiveDevices(SessionContext& session, const LayersOfDevices& layers) {
  bool given = true;
  for (size_t device = 0; device < layers.size(); ++device) {
    int64_t statistics = 0, gradient = 0;
    for (const uint32_t layer : layers[device]) {
      given = session.device_of_layer.Set(layer, device) && given;
      statistics = std::max(statistics, StatisticsScratchElements(session.spec, layer));
      gradient = std::max(gradient, GradientScratchElements(session.spec, layer));
    }
    // As ReservationSums counts it.
    SessionDevice& has = *session.devices[device];
    const bool all_at_once = static_cast<int64_t>(layers[device].size()) <= has.executor.parallelism();
    has.statistics_scratch.SetBlockElements(all_at_once ? 0 : statistics);
    has.gradient_scratch.SetBlockElements(all_at_once ? 0 : gradient);
  }
  return given;
}

LayersOfDevices Shard::Assign(const SessionInstall& install, const MethodSet& methods, const SessionContext* known,
                              const DeviceBytes& taken) const {
  const std::vector<MeasuredCost> costs = context_->costs.Snapshot();
  std::vector<AssignmentDevice> devices;
  for (size_t i = 0; i < taken.of.size(); ++i) {
    devices.push_back({.free_bytes = context_->memory.capacity() - taken.of[i],
                       .parallelism = context_->devices[i].executor.parallelism()});
  }
  if (devices.size() > 1) {
    for (const std::shared_ptr<ShardSession>& session : AllSessions()) {
      if (session->id() != install.session_id) AddLoad(*session, costs, devices);
    }
  }
  std::vector<int> fixed(install.spec.layers.size(), -1);
  for (uint32_t layer = 0; known != nullptr && layer < fixed.size(); ++layer) {
    fixed[layer] = known->device_of_layer.Of(layer);
  }
  return AssignDevices(install.spec, methods, install.layers, fixed, costs, context_->options.window_steps, devices,
                       context_->ranks());
}

absl::StatusOr<LayerRoom> Shard::MakeRoom(const SessionInstall& install, const MethodSet& methods,
                                          const SessionContext* known, bool held, const DeviceBytes& reserved) {
  for (;;) {
    const DeviceBytes before = context_->memory.reserved();
    LayerRoom room;
    room.layers = Assign(install, methods, known, before - reserved);
    room.sizes = FactorSizes(*context_, install.spec, methods, room.layers);
    room.bytes = held ? room.sizes.held : room.sizes.released;
    room.more = Excess(room.bytes, reserved);
    const absl::Status status = context_->memory.Reserve(install.spec.name, room.more);
    if (status.ok()) return room;
    // Another session may have taken this room, and left some on other devices.
    if (context_->devices.size() == 1 || context_->memory.reserved() == before) return status;
  }
}

void Shard::NoteLayers(const SessionInstall& install, const LayerRoom& room, absl::string_view event) {
  context_->observer.OnSessionGradientMemory(install.spec.name, room.sizes.released.total());
  context_->observer.OnSessionMemory(install.spec.name, room.bytes.total());
  context_->logger.Log(Severity::kInfo, event,
                       {{"session", install.spec.name},
                        {"session_id", install.session_id},
                        {"epoch", install.epoch},
                        {"layers", static_cast<uint64_t>(install.layers.size())},
                        {"reserved_bytes", room.bytes.total()}});
  for (size_t device = 0; device < room.layers.size() && room.layers.size() > 1; ++device) {
    context_->logger.Log(Severity::kInfo, "session on device",
                         {{"session", install.spec.name},
                          {"device", context_->devices[device].name},
                          {"layers", static_cast<uint64_t>(room.layers[device].size())},
                          {"reserved_bytes", room.bytes.of[device]}});
  }
}

absl::StatusOr<int64_t> Shard::ChangeLayers(const std::shared_ptr<ShardSession>& session, const SessionInstall& install,
                                            bool record) {
  SessionContext& context = session->context();
  PRECONDOR_ASSIGN_OR_RETURN(const SessionFactors::FactorState state, session->factors().state());
  // What is to go is freed when the new layers are there: until then both count.
  PRECONDOR_ASSIGN_OR_RETURN(const LayerRoom room, MakeRoom(install, context.methods, &context,
                                                            state.held || state.writing != 0, state.reserved));
  const absl::Status busy = absl::UnavailableError(
      absl::StrCat("session \"", install.spec.name, "\": it is being changed already; try again"));
  absl::StatusOr<std::shared_ptr<ShardSession>> next = busy;
  if (GiveDevices(context, room.layers)) next = session->WithLayers(install, state, room.sizes);
  if (!next.ok()) {
    context_->memory.Release(room.more);
    return next.status();
  }
  // Before the layers' records of the new epoch. Should something come between, it is written again.
  if (record) Record(InstallRecord{install});
  bool swapped = false;
  {
    MutexLock lock(mu_);
    const auto found = sessions_.find(install.session_id);
    swapped = found != sessions_.end() && found->second == session && session->factors().HandOver(state);
    if (swapped) found->second = *next;
  }
  if (!swapped) {
    context_->memory.Release(room.more);
    return busy;
  }
  (*next)->Succeed(*session, install);
  context_->memory.Release(state.reserved + room.more - room.bytes);
  NoteLayers(install, room, "session goes on with other layers");
  return room.bytes.total();
}

}  // namespace precondor

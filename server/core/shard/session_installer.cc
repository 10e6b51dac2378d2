// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/session_installer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/method_set.h"
#include "server/core/api/shard_journal.h"
#include "server/core/resources/placement_input.h"
#include "server/core/resources/reservation.h"
#include "server/core/shard/shard_session.h"

namespace precondor {
namespace {

absl::Status CheckInstall(const SessionInstall& install) {
  if (install.session_id == 0) return absl::InvalidArgumentError("session_id: expected anything but 0");
  if (install.epoch == 0) return absl::InvalidArgumentError("epoch: expected at least 1, got 0");
  PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(install.spec));
  for (size_t i = 0; i < install.layers.size(); ++i) {
    const uint32_t layer = install.layers[i];
    if (layer >= install.spec.layers.size() || (i > 0 && layer <= install.layers[i - 1])) {
      return absl::InvalidArgumentError(absl::StrCat("layers[", i, "]: expected ascending places below ",
                                                     install.spec.layers.size(), ", got ", layer));
    }
  }
  for (const Member& member : install.members) {
    if (member.rank >= static_cast<uint32_t>(install.spec.world_size) || member.incarnation == 0) {
      return absl::InvalidArgumentError(absl::StrCat("members: expected ranks below ", install.spec.world_size,
                                                     " and incarnations above 0, got rank ", member.rank,
                                                     " incarnation ", member.incarnation));
    }
  }
  return absl::OkStatus();
}

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

// Assigns devices to the layers of the install, of a session that is new here, and reserves their memory. Returns the
// errors of MemoryAccount::Reserve.
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

// Puts the layers of a session that is being made on the devices of `layers`, and sets the size of their scratch
// blocks.
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

}  // namespace

absl::StatusOr<int64_t> SessionInstaller::Install(const SessionInstall& install, Source source) {
  PRECONDOR_RETURN_IF_ERROR(CheckInstall(install));
  if (absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.FindAny(install.session_id); session.ok()) {
    // Recorded before the layers' records of the new epoch. If Reinstall refuses the install, a replay refuses the
    // record too. An install without news is not recorded: earlier records say more.
    if ((*session)->holders().IsNews(install)) Record(install, source);
    PRECONDOR_RETURN_IF_ERROR((*session)->Reinstall(install));
    return (*session)->factors().reserved_bytes();
  }
  return InstallNew(install, source);
}

void SessionInstaller::Record(const SessionInstall& install, Source source) {
  ShardJournal* const journal = shard_->options.journal;
  if (source == Source::kCoordinator && journal != nullptr) journal->Append(InstallRecord{install});
}

absl::StatusOr<int64_t> SessionInstaller::InstallNew(const SessionInstall& install, Source source) {
  PRECONDOR_RETURN_IF_ERROR(sessions_.CheckNotQuarantined(install.session_id));
  if (install.must_be_held && source == Source::kCoordinator) {
    return ReasonedStatus(absl::StatusCode::kDataLoss, ErrorReason::kStateLost,
                          absl::StrCat("session \"", install.spec.name,
                                       "\": the restored factors are lost, because this shard was restarted before "
                                       "a rank had done a step with them; close the session and restore it again"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(MethodSet methods, MethodSet::Make(install.spec, shard_->options.make_method));
  // A replay replaces no session: the journal has a record of its own for each removed session.
  if (source == Source::kCoordinator) PRECONDOR_RETURN_IF_ERROR(quarantine_.ReplaceSameNameSession(install));
  PRECONDOR_RETURN_IF_ERROR(serving_.CheckNotDraining(install.spec.name));
  PRECONDOR_ASSIGN_OR_RETURN(const LayerReservation room, MakeRoom(*shard_, sessions_, install, methods));
  std::shared_ptr<SessionContext> session_context(
      new SessionContext{.shard = shard_,
                         .session_id = install.session_id,
                         .state_generation = sessions_.NextGeneration(install.session_id),
                         .spec = install.spec,
                         .methods = std::move(methods),
                         .access = install.access,
                         .devices = MakeSessionDevices(*shard_),
                         .device_of_layer = std::vector<int>(install.spec.layers.size(), -1),
                         .restored_layers = RestoredLayers(install.spec.layers.size())});
  GiveDevices(*session_context, room.layers);
  absl::StatusOr<std::shared_ptr<ShardSession>> session =
      ShardSession::Create(std::move(session_context), install, room.sizes);
  if (!session.ok()) {
    shard_->memory.Release(room.bytes);
    return session.status();
  }
  Record(install, source);
  shard_->observer.OnSessionInstalled(install.spec.name);
  if (!sessions_.Insert(*session)) {
    // An identical, concurrent Install was faster. Its session may already be in quarantine again.
    shard_->observer.OnSessionRemoved(install.spec.name);
    shard_->memory.Release((*session)->factors().Close());
    return Install(install, source);
  }
  Report(install, room, "session installed");
  return room.bytes.total();
}

void SessionInstaller::Report(const SessionInstall& install, const LayerReservation& room, absl::string_view event) {
  shard_->observer.OnSessionGradientMemory(install.spec.name, room.sizes.released.total());
  shard_->observer.OnSessionMemory(install.spec.name, room.bytes.total());
  shard_->logger.Log(Severity::kInfo, event,
                     {{"session", install.spec.name},
                      {"session_id", install.session_id},
                      {"epoch", install.epoch},
                      {"layers", static_cast<uint64_t>(install.layers.size())},
                      {"reserved_bytes", room.bytes.total()}});
  for (size_t device = 0; device < room.layers.size() && room.layers.size() > 1; ++device) {
    shard_->logger.Log(Severity::kInfo, "session on device",
                       {{"session", install.spec.name},
                        {"device", shard_->devices[device].name},
                        {"layers", static_cast<uint64_t>(room.layers[device].size())},
                        {"reserved_bytes", room.bytes.of[device]}});
  }
}

}  // namespace precondor

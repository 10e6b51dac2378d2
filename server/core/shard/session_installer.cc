// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/session_installer.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/api/shard_journal.h"
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

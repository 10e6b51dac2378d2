// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/session_installer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/registry.h"
#include "server/core/api/shard_journal.h"
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

// Makes scratch memory for the session's layers. Must agree with ComputeReservation.
ScratchPool MakeScratch(const ShardContext& shard, const SessionInstall& install, int at_once,
                        int64_t (*elements)(const SessionSpec& spec, uint32_t layer)) {
  int64_t widest = 0;
  if (static_cast<int64_t>(install.layers.size()) > at_once) {
    for (const uint32_t layer : install.layers) widest = std::max(widest, elements(install.spec, layer));
  }
  return ScratchPool(shard.backend, widest);
}

}  // namespace

absl::StatusOr<int64_t> SessionInstaller::Install(const SessionInstall& install, Source source) {
  PRECONDOR_RETURN_IF_ERROR(CheckInstall(install));
  if (absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.FindAny(install.session_id); session.ok()) {
    // Recorded before the layers' records of the new epoch. If Reinstall refuses the install, a replay refuses the
    // record too. An install without news is not recorded: earlier records say more.
    if ((*session)->holders().IsNews(install)) Record(install, source);
    PRECONDOR_RETURN_IF_ERROR((*session)->Reinstall(install));
    return (*session)->reserved_bytes();
  }
  return InstallNew(install, source);
}

void SessionInstaller::Record(const SessionInstall& install, Source source) {
  ShardJournal* const journal = shard_->options.journal;
  if (source == Source::kCoordinator && journal != nullptr) journal->Append(InstallRecord{install});
}

absl::StatusOr<int64_t> SessionInstaller::InstallNew(const SessionInstall& install, Source source) {
  PRECONDOR_RETURN_IF_ERROR(sessions_.CheckNotLeaving(install.session_id));
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
  const Reservation reservation =
      ComputeReservation(install.spec, methods, install.layers, shard_->options.window_steps,
                         shard_->executor.parallelism(), shard_->memory.free());
  const int64_t bytes = reservation.total();
  PRECONDOR_RETURN_IF_ERROR(shard_->memory.Reserve(install.spec.name, bytes));
  std::shared_ptr<SessionContext> session_context(new SessionContext{
      .shard = shard_,
      .session_id = install.session_id,
      .layers_at_once = reservation.at_once,
      .state_generation = sessions_.NextGeneration(install.session_id),
      .spec = install.spec,
      .methods = std::move(methods),
      .access = install.access,
      .statistics_scratch = MakeScratch(*shard_, install, reservation.at_once, StatisticsScratchElements),
      .gradient_scratch = MakeScratch(*shard_, install, reservation.at_once, GradientScratchElements),
      .restored_layers = RestoredLayers(install.spec.layers.size())});
  absl::StatusOr<std::shared_ptr<ShardSession>> session =
      ShardSession::Create(std::move(session_context), install, bytes);
  if (!session.ok()) {
    shard_->memory.Release(bytes);
    return session.status();
  }
  Record(install, source);
  shard_->observer.OnSessionInstalled(install.spec.name);
  if (!sessions_.Insert(*session)) {
    // An identical, concurrent Install was faster. Its session may already be in quarantine again.
    shard_->observer.OnSessionRemoved(install.spec.name);
    shard_->memory.Release(bytes);
    return Install(install, source);
  }
  shard_->observer.OnSessionMemory(install.spec.name, bytes);
  shard_->logger.Log(Severity::kInfo, "session installed",
                     {{"session", install.spec.name},
                      {"session_id", install.session_id},
                      {"epoch", install.epoch},
                      {"layers", static_cast<uint64_t>(install.layers.size())},
                      {"layers_at_once", reservation.at_once},
                      {"reserved_bytes", bytes}});
  return bytes;
}

}  // namespace precondor

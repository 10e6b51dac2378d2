// SPDX-License-Identifier: Apache-2.0
// A session's layers on a shard, and how they become others.
#include "server/core/shard_layers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/reservation.h"
#include "server/core/shard.h"
#include "server/core/shard_session.h"

namespace precondor {

SessionFactors::Sizes FactorSizes(const ShardContext& shard, const SessionInstall& install, const MethodSet& methods) {
  const int window = shard.options.window_steps;
  const int parallelism = shard.executor.parallelism();
  return {.held = ComputeReservation(install.spec, methods, install.layers, window, parallelism).total(),
          .released = ComputeFirstOrderReservation(install.spec, install.layers, window, parallelism).total()};
}

bool TakesOver(const ShardContext& shard, const SessionInstall& install) {
  // In its first epoch a session has not gone on anywhere, and one that waits has its layers where they were. Where
  // several ranks get each answer, those of the lost shard's last step may differ from what comes now: OpenSession
  // refuses such a session.
  return shard.options.peers != nullptr && install.epoch > 1 && GradientContributors(install.spec) == 1 &&
         install.spec.on_shard_loss == ShardLossPolicy::kDegrade;
}

std::pair<int64_t, int64_t> ScratchElements(const SessionInstall& install) {
  int64_t statistics = 0;
  int64_t gradient = 0;
  for (uint32_t index : install.layers) {
    const LayerSpec& layer = install.spec.layers[index];
    statistics = std::max(statistics, StatisticsScratchElements(install.spec, index));
    gradient = std::max(gradient, 2 * layer.d_out * layer.d_in);
  }
  return {statistics, gradient};
}

void Shard::NoteLayers(const SessionInstall& install, int64_t bytes, absl::string_view event) {
  context_->observer.OnSessionMemory(install.spec.name, bytes);
  context_->logger.Log(Severity::kInfo, event,
                       {{"session", install.spec.name},
                        {"session_id", install.session_id},
                        {"epoch", install.epoch},
                        {"layers", static_cast<uint64_t>(install.layers.size())},
                        {"reserved_bytes", bytes}});
}

absl::StatusOr<int64_t> Shard::ChangeLayers(const std::shared_ptr<ShardSession>& session, const SessionInstall& install,
                                            bool record) {
  SessionContext& context = session->context();
  const SessionFactors::Sizes sizes = FactorSizes(*context_, install, context.methods);
  PRECONDOR_ASSIGN_OR_RETURN(const SessionFactors::Standing standing, session->factors().standing());
  const int64_t bytes = standing.held || standing.writing != 0 ? sizes.held : sizes.released;
  // What is to go is freed when the new layers are there: until then both count.
  const int64_t more = std::max<int64_t>(bytes - standing.reserved, 0);
  PRECONDOR_RETURN_IF_ERROR(context_->memory.Reserve(install.spec.name, more));
  const auto [statistics, gradient] = ScratchElements(install);
  context.statistics_scratch.Grow(statistics);
  context.gradient_scratch.Grow(gradient);
  absl::StatusOr<std::shared_ptr<ShardSession>> next =
      session->WithLayers(install, standing, sizes, record && TakesOver(*context_, install));
  if (!next.ok()) {
    context_->memory.Release(more);
    return next.status();
  }
  // Before the layers' records of the new epoch. Should something come between, it is written again.
  if (record) Record(InstallRecord{install});
  bool swapped = false;
  {
    MutexLock lock(mu_);
    const auto found = sessions_.find(install.session_id);
    swapped = found != sessions_.end() && found->second == session && session->factors().HandOver(standing);
    if (swapped) found->second = *next;
  }
  if (!swapped) {
    context_->memory.Release(more);
    return absl::UnavailableError(
        absl::StrCat("session \"", install.spec.name, "\": it is being changed already; try again"));
  }
  (*next)->Succeed(*session, install);
  (*next)->BeginTakeover();
  context_->memory.Release(standing.reserved + more - bytes);
  NoteLayers(install, bytes, "session goes on with other layers");
  return bytes;
}

}  // namespace precondor

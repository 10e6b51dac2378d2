// SPDX-License-Identifier: Apache-2.0
// Makes the shards hold the factors that sessions need: none if all remaining steps are in first order. Shards hold
// factors again before a return to second order is written, and so announced. They release factors at the next
// Reconcile.
#include <algorithm>
#include <utility>

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_session.h"

namespace precondor {

absl::Status Coordinator::SendFactorHold(const CoordinatorSession& session, size_t shard, const FactorHold& hold) {
  absl::Status status = shards_[shard].control->HoldFactors(hold);
  if (!status.ok()) {
    logger_.Log(Severity::kWarning, hold.hold ? "factors not held again" : "factors not released",
                {{"session", session.spec().name},
                 {"session_id", session.id()},
                 {"shard", shards_[shard].address},
                 {"reason", absl::string_view(status.message())}});
  }
  return status;
}

absl::Status Coordinator::HoldFactors(CoordinatorSession& session) {
  FactorHold hold;
  std::vector<PlacedLayers> placement;
  {
    MutexLock lock(mu_);
    hold = session.MakeFactorHold();
    placement = session.placement().shards();
  }
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (placement[s].layers.empty()) continue;
    const absl::Status held = SendFactorHold(session, s, hold);
    // A shard that has lost the session makes factors at its next Install.
    if (GetErrorReason(held) != ErrorReason::kUnknownSession) PRECONDOR_RETURN_IF_ERROR(held);
  }
  return absl::OkStatus();
}

void Coordinator::ReconcileFactors(size_t shard, const ShardDescription& description) {
  std::vector<std::pair<std::shared_ptr<CoordinatorSession>, FactorHold>> holds;
  {
    MutexLock lock(mu_);
    for (const HeldSession& held : description.sessions) {
      const std::shared_ptr<CoordinatorSession> session = sessions_.Find(held.session_id);
      if (session == nullptr || session->NeedsFactors() != held.factors_released) continue;
      holds.emplace_back(session, session->MakeFactorHold());
    }
  }
  // The next Reconcile repeats calls that fail.
  for (const auto& [session, hold] : holds) SendFactorHold(*session, shard, hold).IgnoreError();
}

}  // namespace precondor

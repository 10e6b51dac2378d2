// SPDX-License-Identifier: Apache-2.0
// One session on a shard: its members and the layers that the shard owns.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/core/layer/layer_driver.h"
#include "server/core/shard/session_context.h"
#include "server/core/shard/session_factors.h"
#include "server/core/shard/session_holders.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_summary.h"

namespace precondor {

// Thread-safe. Lock order: mu_ is a leaf; layers are called without it.
class ShardSession {
 public:
  // Allocates the layers' states, if factors are needed. `sizes`: that which applies has been reserved. Errors:
  // those of Method::MakeState.
  static absl::StatusOr<std::shared_ptr<ShardSession>> Create(std::shared_ptr<SessionContext> context,
                                                              const SessionInstall& install,
                                                              const SessionFactors::Sizes& sizes);

  // A later Install of the session (see ShardControl). FailedPrecondition: SPEC_MISMATCH, STALE_EPOCH, or
  // STALE_INCARNATION when a rank has another holder in the same epoch.
  absl::Status Reinstall(const SessionInstall& install);
  // Whether `install` gives the session other layers here, in a later epoch. FailedPrecondition: SPEC_MISMATCH, or
  // STALE_EPOCH when it is not later.
  absl::StatusOr<bool> ChangesLayers(const SessionInstall& install) const;
  // The session with the layers of `install`, some of them this one's, which know
  // nothing of it yet. `state` is how this one's factors stand, `sizes` are the new ones. Errors: those of
  // Method::MakeState.
  absl::StatusOr<std::shared_ptr<ShardSession>> WithLayers(const SessionInstall& install,
                                                           const SessionFactors::FactorState& state,
                                                           const SessionFactors::Sizes& sizes) const;
  // Goes on in the place of `previous`, which made it: kept layers begin the epoch, those that left end.
  void Succeed(const ShardSession& previous, const SessionInstall& install);
  // See ShardControl.
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence);

  const SessionHolders& members() const { return members_; }
  const std::vector<uint32_t>& owned() const { return owned_; }
  // Null: the session has no such layer, or another shard has it.
  LayerDriver* layer(uint32_t index) const { return index < layers_.size() ? layers_[index].get() : nullptr; }

  // Ends the session; waiting results get `why`.
  void Close(const absl::Status& why);
  // Logs and reports whom a step has been waiting for since before `since`, when that has changed.
  void ReportStragglers(absl::Time since);

  // The layers have had their records.
  void FinishReplay();

  const SessionSpec& spec() const { return context_->spec; }
  uint64_t id() const { return context_->session_id; }
  SessionContext& context() const { return *context_; }
  std::shared_ptr<SessionContext> shared_context() const { return context_; }
  SessionFactors& factors() const { return *factors_; }
  ShardSessionSummary summary() const;

 private:
  ShardSession(std::shared_ptr<SessionContext> context, std::vector<uint32_t> owned,
               std::vector<std::shared_ptr<LayerDriver>> layers, std::shared_ptr<SessionFactors> factors,
               const SessionInstall& install);
  absl::Status CheckSpec(const SessionInstall& install) const;
  absl::Status EpochHasBegun(uint64_t epoch) const;
  // A layer ends what it has of earlier epochs and begins that of `install`; `replaced` as in LayerDriver::BeginEpoch.
  void BeginEpoch(uint32_t layer, const SessionInstall& install, const std::vector<Member>& replaced) const;

  // Const after construction.
  const std::shared_ptr<SessionContext> context_;
  const std::vector<uint32_t> owned_;
  const std::vector<std::shared_ptr<LayerDriver>> layers_;  // by layer index; null: another shard's
  const std::shared_ptr<SessionFactors> factors_;

  SessionHolders members_;

  mutable Mutex mu_;
  std::set<uint32_t> stragglers_ ABSL_GUARDED_BY(mu_);  // as last reported
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// A session on a shard: its members and the layers that the shard owns.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/core/api/shard_control.h"
#include "server/core/api/shard_summary.h"
#include "server/core/layer/admission.h"
#include "server/core/layer/layer_driver.h"
#include "server/core/resources/session_context.h"

namespace precondor {

// The holders of a session's ranks, as a shard knows them. Thread-safe; mu_ is a leaf lock. The epoch never decreases.
// `spec` must outlive the object.
class SessionHolders {
 public:
  SessionHolders(const SessionSpec& spec, const SessionInstall& install);

  // Returns a snapshot, which is never edited.
  std::shared_ptr<const RankHolders> current() const;
  uint64_t epoch() const { return current()->epoch; }
  // Returns the errors of CheckSender.
  absl::Status Check(const ContributionKey& key) const { return CheckSender(spec_, *current(), key); }

  // Returns whether Install would change the epoch or the members, or the job goes back by it.
  bool IsNews(const SessionInstall& install) const;
  // Adopts the members of `install`. If a new epoch begins, or the job goes back in this one, returns the members whose
  // ranks had another holder, or none, before. Returns nullopt if the current epoch continues. Returns
  // FAILED_PRECONDITION and changes nothing: STALE_EPOCH if the epoch is earlier than the current one,
  // STALE_INCARNATION if a rank has another holder in the same epoch.
  absl::StatusOr<std::optional<std::vector<Member>>> Install(const SessionInstall& install);
  // Ends the current epoch because that of `fence` is about to begin. Returns the members of `fence` whose ranks had
  // another holder, or none, before. Returns nullopt if the epoch has already been installed here. Returns
  // FAILED_PRECONDITION (STALE_EPOCH) if the epoch is earlier than the current one, INVALID_ARGUMENT (UNKNOWN_RANK) if
  // a member's rank does not exist.
  absl::StatusOr<std::optional<std::vector<Member>>> Fence(const EpochFence& fence);

 private:
  absl::Status StaleEpoch(uint64_t got) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const SessionSpec& spec_;

  mutable Mutex mu_;
  // Replaced as a whole, never edited.
  std::shared_ptr<const RankHolders> holders_ ABSL_GUARDED_BY(mu_);
};

// Thread-safe. mu_ is a leaf lock; layers are called without it.
class ShardSession {
 public:
  // Makes the session, with fresh factors. Precondition: the caller has reserved `reserved_bytes`, and releases them
  // when the session has left the shard. Returns the errors of Method::MakeState.
  static absl::StatusOr<std::shared_ptr<ShardSession>> Create(std::shared_ptr<SessionContext> context,
                                                              const SessionInstall& install, int64_t reserved_bytes);

  // Handles a later Install of the session (see ShardControl). Returns FAILED_PRECONDITION: SPEC_MISMATCH for another
  // spec or other layers, STALE_EPOCH, or STALE_INCARNATION if a rank has another holder in the same epoch.
  absl::Status Reinstall(const SessionInstall& install);
  // See ShardControl.
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence);

  const SessionHolders& holders() const { return holders_; }
  const std::vector<uint32_t>& owned() const { return owned_; }
  // Returns null if the session has no such layer or another shard owns it.
  LayerDriver* layer(uint32_t index) const { return index < layers_.size() ? layers_[index].get() : nullptr; }

  // Ends the session; waiting requests get `why`.
  void Close(const absl::Status& why);
  // Logs and reports the ranks that a step has been waiting for since before `since`, if they have changed.
  void ReportStragglers(absl::Time since);

  // Precondition: the layers have received all their records.
  void FinishReplay();

  const SessionSpec& spec() const { return context_->spec; }
  uint64_t id() const { return context_->session_id; }
  SessionContext& context() const { return *context_; }
  std::shared_ptr<SessionContext> shared_context() const { return context_; }
  int64_t reserved_bytes() const { return reserved_bytes_; }
  ShardSessionSummary summary() const;

 private:
  ShardSession(std::shared_ptr<SessionContext> context, std::vector<uint32_t> owned,
               std::vector<std::shared_ptr<LayerDriver>> layers, const SessionInstall& install, int64_t reserved_bytes);
  absl::Status CheckSpec(const SessionInstall& install) const;
  absl::Status EpochHasBegun(uint64_t epoch) const;
  // Ends the earlier epochs of a layer and begins that of `install`. `replaced`: see LayerDriver::BeginEpoch.
  void BeginEpoch(uint32_t layer, const SessionInstall& install, const std::vector<Member>& replaced) const;

  // Constant after construction.
  const std::shared_ptr<SessionContext> context_;
  const std::vector<uint32_t> owned_;
  const std::vector<std::shared_ptr<LayerDriver>> layers_;  // by layer index; null: owned by another shard
  const int64_t reserved_bytes_;

  SessionHolders holders_;

  mutable Mutex mu_;
  std::set<uint32_t> stragglers_ ABSL_GUARDED_BY(mu_);  // as last reported
};

}  // namespace precondor

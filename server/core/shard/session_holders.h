// SPDX-License-Identifier: Apache-2.0
// The holders of a session's ranks, as a shard knows them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "server/core/api/shard_control.h"
#include "server/core/layer/admission.h"

namespace precondor {

// Thread-safe; mu_ is a leaf lock. The epoch never decreases. `spec` must outlive the object.
class SessionHolders {
 public:
  SessionHolders(const SessionSpec& spec, const SessionInstall& install);

  // Returns a snapshot, which is never edited.
  std::shared_ptr<const RankHolders> current() const;
  uint64_t epoch() const { return current()->epoch; }
  // Returns the errors of CheckSender.
  absl::Status Check(const ContributionKey& key) const { return CheckSender(spec_, *current(), key); }

  // Returns whether Install would change the epoch or the members.
  bool IsNews(const SessionInstall& install) const;
  // Adopts the members of `install`. If a new epoch begins, returns the members whose ranks had another holder, or
  // none, before. Returns nullopt if the current epoch continues. Returns FAILED_PRECONDITION and changes nothing:
  // STALE_EPOCH if the epoch is earlier than the current one, STALE_INCARNATION if a rank has another holder in the
  // same epoch.
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

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Who holds the ranks of a session, as a shard knows it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "server/core/admission.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// Thread-safe; mu_ is a leaf. Epochs only rise. `spec` outlives it.
class SessionHolders {
 public:
  SessionHolders(const SessionSpec& spec, const SessionInstall& install);

  // Never edited: a reader keeps what it has.
  std::shared_ptr<const RankHolders> current() const;
  uint64_t epoch() const { return current()->epoch; }
  // Errors: those of CheckSender.
  absl::Status Check(const ContributionKey& key) const { return CheckSender(spec_, *current(), key); }

  // Whether Install would change anything.
  bool IsNews(const SessionInstall& install) const;
  // The members of `install` are the session's. With a new epoch: those whose ranks had another holder, or none.
  // Nullopt: the epoch goes on. FailedPrecondition, and nothing has changed: STALE_EPOCH; STALE_INCARNATION when a rank
  // has another holder in the same epoch.
  absl::StatusOr<std::optional<std::vector<Member>>> Install(const SessionInstall& install);
  // The session's epoch ends; that of `fence` has begun elsewhere. Returns those of its members whose ranks had another
  // holder, or none. Nullopt: the epoch has begun here too. FailedPrecondition STALE_EPOCH; InvalidArgument
  // UNKNOWN_RANK.
  absl::StatusOr<std::optional<std::vector<Member>>> Fence(const EpochFence& fence);
  // Those of `members` whose ranks have another holder, or none.
  std::vector<Member> ReplacedBy(const std::vector<Member>& members) const;

 private:
  absl::Status StaleEpoch(uint64_t got) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const SessionSpec& spec_;

  mutable Mutex mu_;
  // Published whole and never edited.
  std::shared_ptr<const RankHolders> holders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor

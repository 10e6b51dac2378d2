// SPDX-License-Identifier: Apache-2.0
// Which sessions a shard has, and which are in quarantine.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/shard/session_factors.h"
#include "server/core/shard/shard_context.h"

namespace precondor {

class ShardSession;

// Where a session is that is in quarantine, or on its way there or back. All but kClosing and kStored belong to one
// thread, which has claimed the session.
enum class QuarantineState : uint8_t {
  kClosing,    // out of memory, but work of it may still be under way
  kWriting,    // the journal is moving it to quarantine
  kStored,     // there
  kReturning,  // being replayed
  kDeleting,
};

// How a session leaves memory.
enum class Removal : uint8_t {
  kReplayed,    // as the journal says, which needs no record
  kPermanent,   // recorded as removed
  kQuarantine,  // recorded as quarantined
};

// Thread-safe. A session is in the table, in quarantine, or, while it returns, in both; Find does not see it then. Lock
// order: mu_ comes before the lock of SessionFactors, and no other is taken under it.
class ShardSessions {
 public:
  // `shard` outlives the table.
  explicit ShardSessions(ShardContext& shard) : shard_(shard) {}

  // NotFound UNKNOWN_SESSION; Unavailable NOT_ACTIVE: the session is in quarantine, or on its way there or back.
  absl::StatusOr<std::shared_ptr<ShardSession>> Find(uint64_t session_id) const;
  // Finds a session that returns from quarantine too. NotFound UNKNOWN_SESSION.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindAny(uint64_t session_id) const;
  // NotFound UNKNOWN_SESSION.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindByName(absl::string_view name) const;
  // All that Find finds, by ascending id.
  std::vector<std::shared_ptr<ShardSession>> All() const;

  // False, and nothing has changed: the session is here, or in quarantine and does not return.
  bool Insert(const std::shared_ptr<ShardSession>& session);
  // Puts `next` in the place of `previous`, whose factors it takes over. False, and nothing has changed: `previous` is
  // not here any more, or its factors are not as `state` says.
  bool Replace(const ShardSession& previous, std::shared_ptr<ShardSession> next,
               const SessionFactors::FactorState& state);
  // Takes the session out, ends it, records that and gives its memory back. Null: it is not here. Unavailable
  // NOT_ACTIVE: it returns from quarantine, which ends only kReplayed.
  absl::StatusOr<std::shared_ptr<ShardSession>> TakeOut(uint64_t session_id, Removal how);
  // TakeOut, logged. False: the session is not here.
  absl::StatusOr<bool> Remove(uint64_t session_id, Removal how);

  // How often a session that had been removed has been installed again since the process began.
  uint64_t state_generation() const { return state_generation_.load(std::memory_order_acquire); }
  // The number of a session that is about to be installed: 0, or the next one if it had been removed.
  uint64_t NextGeneration(uint64_t session_id);

  bool IsQuarantined(uint64_t session_id) const;
  // Unavailable NOT_ACTIVE: the session is in quarantine and does not return.
  absl::Status CheckNotQuarantined(uint64_t session_id) const;
  void SetQuarantined(uint64_t session_id, QuarantineState state, uint64_t last_step);
  // Takes a session that is kStored to `state`, for the caller to end with Release. False: it is not in quarantine.
  // Unavailable NOT_ACTIVE: another thread has it, or it has not arrived.
  absl::StatusOr<bool> Claim(uint64_t session_id, QuarantineState state);
  // `gone`: the session is not in quarantine any more; otherwise it is kStored.
  void Release(uint64_t session_id, bool gone);
  // Takes the sessions whose work has ended from kClosing to kWriting. Returns each with the last step that it began.
  std::vector<std::pair<uint64_t, uint64_t>> ClaimClosed();

 private:
  struct Quarantined {
    QuarantineState state = QuarantineState::kStored;
    uint64_t last_step = 0;
    std::weak_ptr<SessionContext> work;  // kClosing: what is still under way
  };
  void CountSessions() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountQuarantined() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  ShardContext& shard_;
  std::atomic<uint64_t> state_generation_ = 0;

  mutable Mutex mu_;
  std::map<uint64_t, std::shared_ptr<ShardSession>> sessions_ ABSL_GUARDED_BY(mu_);  // in order, as SessionTable
  absl::flat_hash_set<uint64_t> removed_ ABSL_GUARDED_BY(mu_);                       // since the process began
  std::map<uint64_t, Quarantined> quarantined_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor

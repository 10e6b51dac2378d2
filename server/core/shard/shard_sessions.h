// SPDX-License-Identifier: Apache-2.0
// The table of a shard's sessions, including those in quarantine.
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
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"
#include "server/core/resources/shard_context.h"

namespace precondor {

// Whether a shard accepts calls, and whether it accepts new sessions. Thread-safe. A shard serves from the start,
// unless BeginReplay is called first.
class ServingState {
 public:
  // Returns UNAVAILABLE from BeginReplay until FinishReplay.
  absl::Status Check() const {
    if (!replaying_.load(std::memory_order_acquire)) return absl::OkStatus();
    return absl::UnavailableError("the shard is bringing its sessions back");
  }
  // Returns UNAVAILABLE (DRAINING) after BeginDrain. `session` is the name of the session to be opened, for the
  // message.
  absl::Status CheckNotDraining(absl::string_view session) const {
    if (!draining_.load(std::memory_order_acquire)) return absl::OkStatus();
    return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kDraining,
                          absl::StrCat("session \"", session, "\": the shard is draining"));
  }

  void BeginReplay() { replaying_.store(true, std::memory_order_release); }
  void FinishReplay() { replaying_.store(false, std::memory_order_release); }
  void BeginDrain() { draining_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> replaying_ = false;
  std::atomic<bool> draining_ = false;
};

class ShardSession;
struct SessionContext;

// State of a session that is in quarantine or moving to or from it. In all states but kClosing and kStored the session
// belongs to the thread that has claimed it.
enum class QuarantineState : uint8_t {
  kClosing,    // out of memory, but tasks of the session may still run
  kWriting,    // the journal is moving it to quarantine
  kStored,     // in quarantine
  kReturning,  // being restored from quarantine
  kDeleting,
};

// How a session leaves memory, and what the journal records.
enum class Removal : uint8_t {
  kReplayed,    // nothing: the journal says so already
  kPermanent,   // a RemoveRecord
  kQuarantine,  // a QuarantineRecord
};

// Thread-safe. A session is in the table, in quarantine, or, while it is being restored, in both; Find does not return
// it then. mu_ is a leaf lock.
class ShardSessions {
 public:
  // `shard` must outlive the table.
  explicit ShardSessions(ShardContext& shard) : shard_(shard) {}

  // Returns NOT_FOUND (UNKNOWN_SESSION), or UNAVAILABLE (NOT_ACTIVE) if the session is in quarantine or moving to or
  // from it.
  absl::StatusOr<std::shared_ptr<ShardSession>> Find(uint64_t session_id) const;
  // Like Find, but also finds a session that is being restored from quarantine. Returns NOT_FOUND (UNKNOWN_SESSION).
  absl::StatusOr<std::shared_ptr<ShardSession>> FindAny(uint64_t session_id) const;
  // Returns NOT_FOUND (UNKNOWN_SESSION).
  absl::StatusOr<std::shared_ptr<ShardSession>> FindByName(absl::string_view name) const;
  // Returns all sessions that Find finds, by ascending id.
  std::vector<std::shared_ptr<ShardSession>> All() const;

  // Adds a session. Returns false and changes nothing if the table has it, or if CheckNotLeaving fails.
  bool Insert(const std::shared_ptr<ShardSession>& session);
  // Removes the session from the table, closes it, records that and releases its memory. Returns null if the table does
  // not have it. Returns UNAVAILABLE (NOT_ACTIVE) if it is being restored from quarantine and `how` is not kReplayed.
  absl::StatusOr<std::shared_ptr<ShardSession>> TakeOut(uint64_t session_id, Removal how);
  // Calls TakeOut and logs the removal. Returns false if the table does not have the session.
  absl::StatusOr<bool> Remove(uint64_t session_id, Removal how);

  // Returns how often a removed session has been installed again since the process began.
  uint64_t state_generation() const { return state_generation_.load(std::memory_order_acquire); }
  // Returns the generation of a session that is about to be installed: 0, or the next number if it was removed before.
  uint64_t NextGeneration(uint64_t session_id);

  bool IsQuarantined(uint64_t session_id) const;
  // Returns UNAVAILABLE (NOT_ACTIVE) if the session is being removed, or in quarantine and not being restored.
  absl::Status CheckNotLeaving(uint64_t session_id) const;
  void SetQuarantined(uint64_t session_id, QuarantineState state, uint64_t last_step);
  // Claims a session in state kStored and sets its state; the caller must call Release. Returns false if the session is
  // not in quarantine. Returns UNAVAILABLE (NOT_ACTIVE) if it has another state.
  absl::StatusOr<bool> Claim(uint64_t session_id, QuarantineState state);
  // Ends a claim: removes the session from quarantine if `gone`, else sets its state to kStored.
  void Release(uint64_t session_id, bool gone);
  // Moves the sessions whose work has ended from kClosing to kWriting. Returns each with the greatest step that it had
  // begun.
  std::vector<std::pair<uint64_t, uint64_t>> ClaimClosed();

 private:
  struct Quarantined {
    QuarantineState state = QuarantineState::kStored;
    uint64_t last_step = 0;
    std::weak_ptr<SessionContext> work;  // in kClosing: expires when the session's last task has ended
  };
  void CountSessions() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountQuarantined() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  ShardContext& shard_;
  std::atomic<uint64_t> state_generation_ = 0;

  mutable Mutex mu_;
  std::map<uint64_t, std::shared_ptr<ShardSession>> sessions_ ABSL_GUARDED_BY(mu_);  // ordered, as in SessionTable
  absl::flat_hash_set<uint64_t> removed_ ABSL_GUARDED_BY(mu_);                       // since the process began
  absl::flat_hash_set<uint64_t> removing_ ABSL_GUARDED_BY(mu_);                      // until the journal knows
  std::map<uint64_t, Quarantined> quarantined_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor

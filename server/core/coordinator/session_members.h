// SPDX-License-Identifier: Apache-2.0
// The holders of a session's ranks, and the epoch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/shard_control.h"

namespace precondor {

// A change is planned, written by the caller and then adopted. Not thread-safe.
class SessionMembers {
 public:
  // `session_name` is for messages of errors.
  SessionMembers(std::string session_name, Membership membership);

  // Returns the membership of a new session: epoch 1, no rank joined.
  static Membership First(const SessionSpec& spec);
  // Returns `membership` with a rollback of the job to `step` in its epoch.
  static Membership RolledBack(Membership membership, uint64_t step);

  const Membership& membership() const { return membership_; }
  uint64_t epoch() const { return membership_.epoch; }
  uint32_t joined() const;
  // Returns whether every rank has a holder.
  bool active() const { return joined() == membership_.incarnations.size(); }
  // Returns whether no rank has ever had a holder.
  bool fresh() const;
  // Returns whether every rank has had a holder.
  bool ever_active() const;
  // Returns the holders, ascending by rank.
  std::vector<Member> Members() const;
  // Returns the ranks without a holder, ascending.
  std::vector<uint32_t> Missing() const;

  // Plans that a worker that begins at `first_step` takes the rank. Every holder of a rank but the first begins a new
  // epoch. Returns nullopt if the worker already holds the rank. Returns INVALID_ARGUMENT (MALFORMED), NOT_FOUND
  // (UNKNOWN_RANK), or FAILED_PRECONDITION (STALE_INCARNATION) if a later incarnation has held the rank.
  absl::StatusOr<std::optional<Membership>> PlanJoin(uint32_t rank, uint64_t incarnation, uint64_t first_step) const;
  // Plans that the worker gives the rank back. Returns nullopt if it already has. Returns NOT_FOUND (UNKNOWN_RANK) or
  // FAILED_PRECONDITION (STALE_INCARNATION).
  absl::StatusOr<std::optional<Membership>> PlanLeave(uint32_t rank, uint64_t incarnation) const;
  // Checks that the worker holds the rank in this epoch. Returns NOT_FOUND (UNKNOWN_RANK) or FAILED_PRECONDITION
  // (STALE_EPOCH or STALE_INCARNATION).
  absl::Status CheckMember(uint32_t rank, uint64_t incarnation, uint64_t epoch) const;
  void Adopt(Membership next);

  // Returns whether the shards know the members of this epoch.
  bool shards_told() const { return shards_told_; }
  // Notes that the shards have been told `told`. Has no effect if the membership has changed since: the caller that
  // changed it tells the shards again.
  void NoteShardsTold(const Membership& told);

 private:
  std::string RankText(uint32_t rank) const;
  absl::Status CheckHolder(uint32_t rank, uint64_t incarnation) const;

  const std::string session_name_;
  Membership membership_;
  bool shards_told_ = false;
};

}  // namespace precondor

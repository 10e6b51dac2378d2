// SPDX-License-Identifier: Apache-2.0
// Who holds each rank of a session, and in which epoch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "server/core/coordinator/coordinator_journal.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// A change is planned, written down by the caller, and then adopted. Not thread-safe.
class SessionMembers {
 public:
  // `session_name`: for errors.
  SessionMembers(std::string session_name, Membership membership);

  // A session begins with no rank joined.
  static Membership First(const SessionSpec& spec);
  // `membership` when the job goes back to `step` with its epoch.
  static Membership RolledBack(Membership membership, uint64_t step);

  const Membership& membership() const { return membership_; }
  uint64_t epoch() const { return membership_.epoch; }
  uint32_t joined() const;
  // All ranks are held.
  bool active() const { return joined() == membership_.incarnations.size(); }
  // No rank has ever been held.
  bool fresh() const;
  // The ranks that are held, ascending.
  std::vector<Member> Members() const;

  // The membership once the rank's place is taken by a worker that begins at `first_step`; nullopt: it has it already.
  // A later holder begins a new epoch. Errors: InvalidArgument, NotFound UNKNOWN_RANK, FailedPrecondition
  // STALE_INCARNATION.
  absl::StatusOr<std::optional<Membership>> PlanJoin(uint32_t rank, uint64_t incarnation, uint64_t first_step) const;
  // The membership once the rank is given back; its next holder begins a new epoch. nullopt: it is free already. Errors
  // as for PlanJoin.
  absl::StatusOr<std::optional<Membership>> PlanLeave(uint32_t rank, uint64_t incarnation) const;
  // Whether a worker holds the rank in this epoch. Errors: NotFound UNKNOWN_RANK, FailedPrecondition STALE_EPOCH or
  // STALE_INCARNATION.
  absl::Status CheckMember(uint32_t rank, uint64_t incarnation, uint64_t epoch) const;
  void Adopt(Membership next);

  // The shards know the members of this epoch.
  bool shards_told() const { return shards_told_; }
  // They have been told of this membership. When it has changed since, the caller that changed it tells them again.
  void NoteShardsTold(const Membership& told) { shards_told_ = shards_told_ || told == membership_; }

 private:
  std::string RankText(uint32_t rank) const;
  absl::Status CheckHolder(uint32_t rank, uint64_t incarnation) const;

  const std::string session_name_;
  Membership membership_;
  bool shards_told_ = false;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The snapshots of a session: when one is due, what it consists of, and what can come of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/coordinator/coordinator_journal.h"
#include "server/core/coordinator/session_members.h"
#include "server/core/coordinator/session_placement.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// A snapshot is planned, written down by the caller, and then adopted. Not thread-safe.
class SessionSnapshots {
 public:
  // `session_name`: for errors.
  explicit SessionSnapshots(std::string session_name) : session_name_(std::move(session_name)) {}

  // Those that are remembered and durable, ascending.
  const std::vector<SessionSnapshot>& list() const { return list_; }
  void Adopt(std::vector<SessionSnapshot> list) { list_ = std::move(list); }

  // The next one, of the state before `step`. FailedPrecondition: one is under way; or as CheckRestored.
  absl::StatusOr<SessionSnapshot> Plan(uint64_t step, uint64_t epoch, const SessionPlacement& placement) const;
  // The one that a session begins with, before any rank has joined. FailedPrecondition: a rank has joined.
  absl::StatusOr<SessionSnapshot> PlanRestore(uint64_t step, const SessionMembers& members,
                                              const SessionPlacement& placement) const;
  // Whether the factors that the session begins with are there. Unavailable: not all have been sent yet;
  // FailedPrecondition: they never will be.
  absl::Status CheckRestored() const;

  // What a shard is asked for. `again`: all shards have heard of the snapshot.
  SnapshotOrder MakeOrder(uint64_t session_id, const SessionSnapshot& snapshot, bool again) const;
  // Why a snapshot under way cannot become whole any more; nullopt: it can.
  static std::optional<std::string> WhyNotWhole(const SessionSnapshot& snapshot, const Membership& membership,
                                                const SessionPlacement& placement);
  // The next one could be begun, and `step` is at least `interval_steps` after the last. An interval of 0: never.
  bool IsDue(uint64_t interval_steps, uint64_t step) const;

 private:
  bool under_way() const { return !list_.empty() && list_.back().state == SnapshotState::kUnderWay; }
  SessionSnapshot Next(uint64_t step, uint64_t epoch, const SessionPlacement& placement) const;

  const std::string session_name_;
  std::vector<SessionSnapshot> list_;
};

}  // namespace precondor

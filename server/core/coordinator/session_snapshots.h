// SPDX-License-Identifier: Apache-2.0
// The snapshots of a session: when one is due, its parts, and why it can fail.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/core/api/coordinator_journal.h"
#include "server/core/api/shard_control.h"
#include "server/core/coordinator/session_members.h"

namespace precondor {

// A snapshot is planned, written by the caller and then adopted. Not thread-safe.
class SessionSnapshots {
 public:
  // `session_name` is for messages of errors.
  explicit SessionSnapshots(std::string session_name) : session_name_(std::move(session_name)) {}

  // Returns the durable snapshots that are remembered, ascending by number.
  const std::vector<SnapshotEntry>& list() const { return list_; }
  void Adopt(std::vector<SnapshotEntry> list) { list_ = std::move(list); }

  // Returns whether no rank has ever joined, and the session has no factors from outside.
  bool IsUnused(const SessionMembers& members) const;
  // Plans the next snapshot, of the state before `step`. Returns FAILED_PRECONDITION if one is under way, or the errors
  // of CheckRestored.
  absl::StatusOr<SnapshotEntry> Plan(uint64_t step, uint64_t epoch, absl::Span<const PlacedLayers> placement) const;
  // Plans the snapshot that a new session begins with. Returns FAILED_PRECONDITION if a rank has joined or a snapshot
  // exists.
  absl::StatusOr<SnapshotEntry> PlanRestore(uint64_t step, const SessionMembers& members,
                                            absl::Span<const PlacedLayers> placement) const;
  // Checks that the session has the factors that it begins with. Returns UNAVAILABLE (NOT_ACTIVE) if some have not been
  // sent yet, DATA_LOSS (STATE_LOST) if a shard has lost some, so that the session can only be closed.
  absl::Status CheckRestored() const;
  // Returns whether the session cannot have the factors that it was to begin with.
  bool RestoreFailed() const { return absl::IsDataLoss(CheckRestored()); }
  // Returns the restore with whose factors the session began.
  std::optional<SnapshotEntry> HeldRestored() const;

  // Returns the order for a shard. `repeated`: all shards have received the order before.
  SnapshotOrder MakeOrder(uint64_t session_id, const SnapshotEntry& snapshot, bool repeated) const;
  // Returns why a snapshot under way can no longer complete, or nullopt if it can.
  static std::optional<std::string> WhyNotWhole(const SnapshotEntry& snapshot, const Membership& membership);
  // Returns whether no snapshot is under way and `step` is at least `interval_steps` after the last one. Returns false
  // if `interval_steps` is 0.
  bool IsDue(uint64_t interval_steps, uint64_t step) const;

 private:
  bool under_way() const { return !list_.empty() && list_.back().state == SnapshotState::kUnderWay; }
  SnapshotEntry Next(uint64_t step, uint64_t epoch, absl::Span<const PlacedLayers> placement) const;

  const std::string session_name_;
  std::vector<SnapshotEntry> list_;
};

}  // namespace precondor

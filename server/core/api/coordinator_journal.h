// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal: decisions that it writes before a worker or a shard learns of them, and restores after a
// restart. server/store keeps it on disk, server/etcd in etcd. Without either, a crash of the coordinator loses its
// sessions.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/session_access.h"
#include "server/policy/fallback.h"

namespace precondor {

// The layers of a session on one shard.
struct PlacedLayers {
  std::string shard;    // as named in the coordinator's configuration
  std::string address;  // address that workers dial
  std::vector<uint32_t> layers;
  bool operator==(const PlacedLayers&) const = default;
};

// The holders of a session's ranks.
struct Membership {
  uint64_t epoch = 1;
  uint64_t rollback_epoch = 0;         // last epoch with which the job rolled back to an earlier step; 0: none
  uint64_t resume_step = 0;            // step of that rollback
  std::vector<uint64_t> incarnations;  // current holder by rank; 0: free
  std::vector<uint64_t> first_steps;   // step at which the rank's last holder began, by rank
  std::vector<uint64_t> last_holders;  // greatest incarnation that ever held the rank, by rank
  bool operator==(const Membership&) const = default;
};

// What workers may rely on even if the coordinator fails.
struct LeaseTerms {
  uint64_t durable_through = 0;        // no rank has been granted a step beyond this one
  std::vector<ModeInterval> schedule;  // modes of all steps granted so far and later
  FallbackState fallback;              // policy state that the schedule was decided from
  bool operator==(const LeaseTerms&) const = default;
};

enum class SnapshotState : uint8_t { kUnderWay = 1, kComplete = 2, kFailed = 3 };

// One shard's part of a session snapshot.
struct SnapshotPart {
  std::string shard;         // as named in the coordinator's configuration
  uint64_t snapshot_id = 0;  // number on the shard; 0: not durable yet
  std::vector<uint32_t> layers;
  bool operator==(const SnapshotPart&) const = default;
};

// A snapshot of a whole session. It is complete once every part is durable, and of no use before.
struct SnapshotEntry {
  uint64_t number = 0;  // number within the session
  uint64_t step = 0;    // contains every update of earlier steps and no others
  uint64_t epoch = 0;   // epoch in which it was begun
  SnapshotState state = SnapshotState::kUnderWay;
  std::string reason;  // reason of a failure
  std::vector<SnapshotPart> parts;
  // The session begins with these factors, which are sent from outside; no worker joins before the snapshot is
  // complete.
  bool restores = false;
  bool operator==(const SnapshotEntry&) const = default;
};

// The whole state of a session: it was opened, or the journal was compacted.
struct SessionRecord {
  uint64_t session_id = 0;
  SessionSpec spec;
  std::vector<PlacedLayers> placement;
  Membership membership;
  LeaseTerms lease;
  SessionAccess access = {};
};
// Each of the following replaces a part of an earlier record. A record of a session that is not open is ignored.
struct MembershipRecord {
  uint64_t session_id = 0;
  Membership membership;
};
struct LeaseRecord {
  uint64_t session_id = 0;
  LeaseTerms lease;
};
// The session has ended, and every shard has removed it.
struct CloseRecord {
  uint64_t session_id = 0;
};
// The session is ending: its name is free, and every shard must remove it. Written before any shard is told, so that a
// restarted coordinator continues the removal. A CloseRecord follows.
struct ClosingRecord {
  uint64_t session_id = 0;
};
// A process begins to lead with a token that is greater than all earlier ones; see ShardControl::BecomeLeader. Belongs
// to no session.
struct LeaderRecord {
  uint64_t token = 0;
};
// All snapshots of the session that are still listed, ascending by number.
struct SnapshotsRecord {
  uint64_t session_id = 0;
  std::vector<SnapshotEntry> snapshots;
};
using CoordinatorRecord = std::variant<SessionRecord, MembershipRecord, LeaseRecord, CloseRecord, SnapshotsRecord,
                                       ClosingRecord, LeaderRecord>;

// Not thread-safe.
class CoordinatorJournal {
 public:
  virtual ~CoordinatorJournal() = default;
  // Writes a record. On OK it survives a crash. After an error it may or may not exist: the caller must let no process
  // rely on it, and a later record of that kind replaces it.
  virtual absl::Status Append(const CoordinatorRecord& record) = 0;
  // Replaces all earlier records by `records`. They are unchanged after an error.
  virtual absl::Status Compact(absl::Span<const CoordinatorRecord> records) = 0;
  // Returns whether enough has been appended since the last compaction to make one worthwhile.
  virtual bool wants_compaction() const = 0;
  // Returns the number of this process's leadership if the storage elects the leader; it is greater than all earlier
  // ones. Returns 0 if the storage elects none; the coordinator then writes LeaderRecords.
  virtual uint64_t leadership() const { return 0; }
};

// Discards all records, for a coordinator without a data directory or etcd.
class NullCoordinatorJournal final : public CoordinatorJournal {
 public:
  absl::Status Append(const CoordinatorRecord&) override { return absl::OkStatus(); }
  absl::Status Compact(absl::Span<const CoordinatorRecord>) override { return absl::OkStatus(); }
  bool wants_compaction() const override { return false; }
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// What a coordinator writes down before a worker or a shard hears of it, and what it goes on from after a restart.
// server/store keeps it on a disk; without one a coordinator that is lost takes its sessions with it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "server/core/session_access.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"

namespace precondor {

// The layers of one shard.
struct PlacedLayers {
  std::string shard;    // as the coordinator's configuration names it
  std::string address;  // that workers dial
  std::vector<uint32_t> layers;
  bool operator==(const PlacedLayers&) const = default;
};

// Who holds each rank.
struct Membership {
  uint64_t epoch = 1;
  uint64_t rollback_epoch = 0;         // the last one with which the job rolled back to an earlier step; 0: none
  uint64_t resume_step = 0;            // that it rolled back to
  std::vector<uint64_t> incarnations;  // by rank; 0: free
  std::vector<uint64_t> first_steps;   // by rank, that its last holder began with
  std::vector<uint64_t> last_holders;  // by rank; the greatest incarnation ever
  bool operator==(const Membership&) const = default;
};

// What workers may rely on, whatever happens to the coordinator.
struct LeaseTerms {
  uint64_t durable_through = 0;        // no step beyond it has been granted to any rank
  std::vector<ModeInterval> schedule;  // of all steps granted so far, and on
  FallbackState fallback;              // that the schedule came from, as of then
  bool operator==(const LeaseTerms&) const = default;
};

enum class SnapshotState : uint8_t { kUnderWay = 1, kComplete = 2, kFailed = 3 };

// What one shard has of a session's snapshot.
struct SnapshotPart {
  std::string shard;         // as the coordinator's configuration names it
  uint64_t snapshot_id = 0;  // the shard's; 0: not durable yet
  std::vector<uint32_t> layers;
  bool operator==(const SnapshotPart&) const = default;
};

// A snapshot of a whole session: complete once every part is durable, and nothing before.
struct SessionSnapshot {
  uint64_t number = 0;  // among the session's
  uint64_t step = 0;    // every update of an earlier step is in it, and no other
  uint64_t epoch = 0;   // in which it was begun
  SnapshotState state = SnapshotState::kUnderWay;
  std::string reason;  // of a failure
  std::vector<SnapshotPart> parts;
  bool restores = false;  // the session begins with it: it comes from outside, no worker joins before it is complete
  bool operator==(const SessionSnapshot&) const = default;
};

// A session was opened; or, after a compaction, how it stood then.
struct SessionRecord {
  uint64_t session_id = 0;
  SessionSpec spec;
  std::vector<PlacedLayers> placement;
  Membership membership;
  LeaseTerms lease;
  SessionAccess access = {};
};
// The others replace what an earlier record said. One whose session is not open means nothing.
struct MembershipRecord {
  uint64_t session_id = 0;
  Membership membership;
};
struct LeaseRecord {
  uint64_t session_id = 0;
  LeaseTerms lease;
};
// The session has ended, and every shard has removed what it had of it.
struct CloseRecord {
  uint64_t session_id = 0;
};
// The session ends: its name is free, and every shard is to remove what it has of it. Written before the first is told,
// so that a coordinator that is restarted in between goes on with it. A CloseRecord follows.
struct ClosingRecord {
  uint64_t session_id = 0;
};
// Of no session: a process begins to lead, with a token greater than any before. See ShardControl::BecomeLeader.
struct LeaderRecord {
  uint64_t token = 0;
};
// All that are still of interest, ascending.
struct SnapshotsRecord {
  uint64_t session_id = 0;
  std::vector<SessionSnapshot> snapshots;
};
using CoordinatorRecord = std::variant<SessionRecord, MembershipRecord, LeaseRecord, CloseRecord, SnapshotsRecord,
                                       ClosingRecord, LeaderRecord>;

// One caller at a time.
class CoordinatorJournal {
 public:
  virtual ~CoordinatorJournal() = default;
  // OK: the record will be there after a crash. Otherwise it may or may not be; the caller lets no process rely on it,
  // and a later record of the same kind replaces it.
  virtual absl::Status Append(const CoordinatorRecord& record) = 0;
  // Puts `records` in the place of everything before. On failure the old ones are still there.
  virtual absl::Status Compact(absl::Span<const CoordinatorRecord> records) = 0;
  // Whether so much has been appended since the last compaction that one would pay.
  virtual bool wants_compaction() const = 0;
  // Where the storage elects a leader: the number of this process's leadership, greater than that of any before. 0: it
  // elects none, and the coordinator counts by LeaderRecords.
  virtual uint64_t leadership() const { return 0; }
};

// Forgets everything: for a coordinator without a disk.
class NullCoordinatorJournal final : public CoordinatorJournal {
 public:
  absl::Status Append(const CoordinatorRecord&) override { return absl::OkStatus(); }
  absl::Status Compact(absl::Span<const CoordinatorRecord>) override { return absl::OkStatus(); }
  bool wants_compaction() const override { return false; }
};

}  // namespace precondor

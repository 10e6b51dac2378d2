// SPDX-License-Identifier: Apache-2.0
// What a coordinator writes down before anybody hears of it, and what it goes on from when it comes back. server/store
// keeps it on a disk; without one a coordinator that is lost takes its sessions with it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
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
  uint64_t went_back_epoch = 0;        // the last one with which the job went back to an earlier step; 0: none
  uint64_t resume_step = 0;            // that it went back to
  std::vector<uint64_t> incarnations;  // by rank; 0: free
  std::vector<uint64_t> first_steps;   // by rank, that its last holder began with
  std::vector<uint64_t> last_holders;  // by rank; the greatest incarnation ever
  bool operator==(const Membership&) const = default;
};

// What workers may rely on, whatever happens to the coordinator.
struct Promise {
  uint64_t durable_through = 0;        // no step beyond it has been granted to anybody
  std::vector<ModeInterval> schedule;  // of all steps granted so far, and on
  FallbackState fallback;              // that the schedule came from, as of then
  bool operator==(const Promise&) const = default;
};

// A session was opened; or, after a compaction, how it stood then.
struct SessionRecord {
  uint64_t session_id = 0;
  SessionSpec spec;
  std::vector<PlacedLayers> placement;
  Membership membership;
  Promise promise;
};
// The others replace what an earlier record said. One whose session is not open means nothing.
struct MembershipRecord {
  uint64_t session_id = 0;
  Membership membership;
};
struct PromiseRecord {
  uint64_t session_id = 0;
  Promise promise;
};
struct CloseRecord {
  uint64_t session_id = 0;
};
using CoordinatorRecord = std::variant<SessionRecord, MembershipRecord, PromiseRecord, CloseRecord>;

// One caller at a time.
class CoordinatorJournal {
 public:
  virtual ~CoordinatorJournal() = default;
  // OK: the record will be there after a crash. Otherwise it may or may not be; the caller lets nobody rely on it, and
  // a later record of the same kind replaces it.
  virtual absl::Status Append(const CoordinatorRecord& record) = 0;
  // Puts `records` in the place of everything before. On failure the old ones are still there.
  virtual absl::Status Compact(absl::Span<const CoordinatorRecord> records) = 0;
  // Whether so much has been appended since the last compaction that one would pay.
  virtual bool wants_compaction() const = 0;
};

// Forgets everything: for a coordinator without a disk.
class NullCoordinatorJournal final : public CoordinatorJournal {
 public:
  absl::Status Append(const CoordinatorRecord&) override { return absl::OkStatus(); }
  absl::Status Compact(absl::Span<const CoordinatorRecord>) override { return absl::OkStatus(); }
  bool wants_compaction() const override { return false; }
};

}  // namespace precondor

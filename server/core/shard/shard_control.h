// SPDX-License-Identifier: Apache-2.0
// What a coordinator asks of a shard: implemented by Shard itself (role all) and by a gRPC client (rpc/).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/session_access.h"

namespace precondor {

struct MeasuredCost {
  std::string method;  // name and options, canonical text
  int64_t d_out = 0;
  int64_t d_in = 0;
  double seconds_per_step = 0;
};

struct HeldSession {
  uint64_t session_id = 0;
  std::string name;
  uint64_t epoch = 0;
  int64_t reserved_bytes = 0;
  bool factors_released = false;
  uint32_t joined = 0;     // ranks that the shard knows the holders of
  uint64_t last_step = 0;  // the greatest that has begun here since the job last rolled back
};

struct DeviceUse {
  std::string name;  // for people: "cuda:0"
  int64_t capacity_bytes = 0;
  int64_t reserved_bytes = 0;
  std::string fault = {};  // that has ended its use; empty: none
};

struct ShardDescription {
  std::string advertise_address;  // what workers dial; empty: the address under which the coordinator knows it
  int64_t capacity_bytes = 0;     // of all devices, as is the next
  int64_t reserved_bytes = 0;
  std::vector<DeviceUse> devices;  // empty: one, of these bytes
  std::vector<MeasuredCost> costs;
  std::vector<HeldSession> sessions;
  absl::Time shard_time = absl::InfinitePast();  // by the shard's monotonic clock; see ShardLease
};

// A shard answers sessions that degrade for `duration` after `from`, which it said itself in an earlier answer: by
// then the coordinator has heard of it. So however late a probe is read, by a process that was stopped meanwhile, it
// grants nothing beyond the time at which the coordinator may give the shard's layers to others.
struct ShardLease {
  absl::Time from = absl::InfinitePast();
  absl::Duration duration = absl::ZeroDuration();
};

struct Member {
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t first_step = 0;  // that it began with
};

struct SessionInstall {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  std::optional<uint64_t> rollback_step = {};  // the epoch begins with this step again: what is kept of any step goes
  // The last epoch with which the job rolled back, this one included; 0: none. A snapshot takes images of layers that
  // agree on it, also of those that are new here.
  uint64_t rollback_epoch = 0;
  SessionSpec spec;
  std::vector<uint32_t> layers;   // owned here, ascending
  std::vector<Member> members;    // joined so far; frames are accepted once all ranks are in
  bool factors_released = false;  // a session that is new here begins without factors: see HoldFactors
  SessionAccess access = {};      // whose secret the session's frames show
};

// Whether a session's factors are needed. What one coordinator said with the greatest version counts: a version that is
// not greater than an earlier one of the same coordinator changes nothing.
struct FactorHold {
  uint64_t session_id = 0;
  uint64_t version = 0;  // from 1
  bool hold = true;
};

// A snapshot of a session that the coordinator has begun: the shard takes its part as of `step`.
struct SnapshotOrder {
  uint64_t session_id = 0;
  uint64_t number = 0;  // among the session's
  uint64_t step = 0;
  bool again = false;               // the shard has taken the order before
  std::vector<uint64_t> keep = {};  // numbers of those to keep besides
  bool restores = false;  // the part is not taken from the job, it is sent: see SnapshotRequests::RestoreLayer
};
struct SnapshotProgress {
  bool begun = false;  // some layer has come to the step
  bool durable = false;
  uint64_t snapshot_id = 0;  // the shard's, once durable
};

// What a shard keeps on its disk of a session that its coordinator did not know.
struct QuarantinedSession {
  SessionInstall install;  // the last
  uint64_t last_step = 0;  // that had been begun
  absl::Time since;        // wall clock, for people
};

// How a new epoch begins: its members, of a session that is installed.
struct EpochFence {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  std::vector<Member> members;
};

// Calls may block on the network, with a deadline of the implementation. Thread-safe.
class ShardControl {
 public:
  virtual ~ShardControl() = default;
  // From here on calls carry this token: greater than that of every coordinator that has led before. A shard that has
  // seen a greater one refuses them all, FailedPrecondition STALE_LEADER, and changes nothing. Before any other call.
  virtual void BecomeLeader(uint64_t token) {}
  virtual absl::StatusOr<ShardDescription> Describe() = 0;
  // Describe for a coordinator that asks whether the shard is there: gives up soon, and grants the lease.
  virtual absl::StatusOr<ShardDescription> Probe(const ShardLease& lease) { return Describe(); }
  // A session in quarantine comes back first, as it was, and then goes on as one that is installed; Unavailable: not
  // yet; DataLoss: it cannot, and stays there.
  // Reserves exactly what the layers need and accepts frames of the epoch; returns the bytes reserved. The same epoch
  // again adds the members and changes nothing else; a greater epoch replaces the membership, factors stay; a smaller
  // one is FailedPrecondition. ResourceExhausted names needed, reserved and capacity.
  virtual absl::StatusOr<int64_t> Install(const SessionInstall& install) = 0;
  // Takes no frame of an earlier epoch any more, and none of this one before it is installed. Returns the first step
  // that a new member goes on from and that this shard keeps no more; nullopt: it keeps them all, or has gone on with
  // this epoch already. NotFound UNKNOWN_SESSION; FailedPrecondition STALE_EPOCH.
  virtual absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) = 0;
  // Not hold: frees the session's factors once the work that uses them has ended and, with a data directory, they are
  // durable there; takes no statistics in. Hold: reserves their memory again and goes on with the factors that were
  // kept, or else with fresh ones; ResourceExhausted CAPACITY when there is no memory for them, Unavailable while
  // layers have yet to let go: they stay released. NotFound UNKNOWN_SESSION.
  virtual absl::Status HoldFactors(const FactorHold& hold) = 0;
  // Has the shard's part of a snapshot taken, and says how far it is. InvalidArgument: the step has been begun and
  // there is none. FailedPrecondition: no data directory, or an order taken before of which nothing is known any more.
  // Aborted: given up, with the reason. NotFound UNKNOWN_SESSION.
  virtual absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) {
    return absl::FailedPreconditionError("snapshot: this shard has no data directory");
  }
  // Frees everything of the session, also of one in quarantine; waiting results get Aborted. False: there was none.
  // For sessions that are known to have ended, and for an operator.
  virtual absl::StatusOr<bool> Remove(uint64_t session_id) = 0;
  // Puts a session that the coordinator does not know in quarantine: memory is freed, what is on the disk stays until
  // the session is installed again, removed, or the shard's time for it is over. Waiting results get Unavailable.
  // Without a data directory there is nothing to keep, and this is Remove. False: there was none.
  virtual absl::StatusOr<bool> Quarantine(uint64_t session_id) = 0;
  virtual absl::StatusOr<std::vector<QuarantinedSession>> ListQuarantined() = 0;
  // Ends the calls under way, and all later ones, with Cancelled. For calls within the process there is nothing to end.
  virtual void CancelCalls() {}
};

}  // namespace precondor

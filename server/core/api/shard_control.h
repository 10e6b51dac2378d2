// SPDX-License-Identifier: Apache-2.0
// The coordinator's interface to a shard. Shard implements it (role all), and so does a gRPC client (rpc/).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/session_access.h"

namespace precondor {

struct HeldSession {
  uint64_t session_id = 0;
  std::string name;
  uint64_t epoch = 0;
  int64_t reserved_bytes = 0;
  uint32_t joined = 0;                // ranks whose holders the shard knows
  uint64_t last_step = 0;             // greatest step that has begun here since the last rollback
  std::vector<uint32_t> layers = {};  // ascending; empty if the shard does not tell
};

// The device on which a shard computes.
struct DeviceUse {
  std::string name;  // for people, such as "cuda:0"
  int64_t capacity_bytes = 0;
  int64_t reserved_bytes = 0;
  std::string fault = {};        // fault that made the device unusable; empty: none
  std::string ring_device = {};  // DevicePlane::device of the memory that workers can share; empty: none
};

struct ShardDescription {
  std::string advertise_address;  // address that workers dial; empty: the one in the coordinator's configuration
  DeviceUse device;
  std::vector<HeldSession> sessions;
};

struct Member {
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t first_step = 0;  // step at which the holder began
};

struct SessionInstall {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  // Last epoch with which the job rolled back, this one included; 0: none. A layer that has not heard of it, because an
  // earlier install was lost, drops what it keeps of all steps. A snapshot combines only images of layers with equal
  // values.
  uint64_t rollback_epoch = 0;
  uint64_t rollback_step = 0;  // step to which the job rolled back then
  SessionSpec spec;
  std::vector<uint32_t> layers;  // owned by this shard, ascending
  std::vector<Member> members;   // ranks that have joined; frames are accepted once all have
  SessionAccess access = {};     // has the secret that the session's frames must show
  // The factors were restored, and no rank has reported a step: a shard that does not hold the session has lost them.
  bool must_be_held = false;
};

// A request of the coordinator to take the shard's part of a session snapshot as of `step`.
struct SnapshotOrder {
  uint64_t session_id = 0;
  uint64_t number = 0;  // number of the snapshot within the session
  uint64_t step = 0;
  bool repeated = false;            // the shard has accepted this order before
  std::vector<uint64_t> keep = {};  // numbers of other snapshots to keep
  bool restores = false;            // the part is not taken but sent; see SnapshotRequests::RestoreLayer
};
struct SnapshotProgress {
  bool begun = false;  // at least one layer has reached the step
  bool durable = false;
  uint64_t snapshot_id = 0;  // number on the shard, once durable
};

// A session that the shard keeps on its disk and that its coordinator did not know.
struct QuarantinedSession {
  SessionInstall install;  // the last install
  uint64_t last_step = 0;  // greatest step that had begun
};

// Announces a new epoch of an installed session, with its members.
struct EpochFence {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  std::vector<Member> members;
};

// Calls may block on the network; the implementation sets a deadline. Thread-safe.
class ShardControl {
 public:
  virtual ~ShardControl() = default;
  // Sets the fencing token that later calls carry. It is greater than that of every earlier leader. A shard that has
  // seen a greater token refuses all calls with FAILED_PRECONDITION (STALE_LEADER) and changes nothing. Precondition:
  // no other call has been made.
  virtual void BecomeLeader(uint64_t token) {}
  // Returns the address that workers dial, of a shard in the coordinator's process; empty for other shards, which
  // Describe asks. It may differ from the one before a restart.
  virtual std::string own_address() const { return ""; }
  virtual absl::StatusOr<ShardDescription> Describe() = 0;
  // Like Describe, for checking whether the shard is alive: has a short deadline.
  virtual absl::StatusOr<ShardDescription> Probe() { return Describe(); }
  // Installs the session: reserves memory for its layers and accepts frames of the epoch. Returns the bytes reserved.
  // An install with the current epoch adds members and changes nothing else. A greater epoch replaces the
  // membership. A session in quarantine is restored first.
  // Returns INVALID_ARGUMENT if the install is malformed. Returns FAILED_PRECONDITION: STALE_EPOCH for an epoch that is
  // earlier than the current one, SPEC_MISMATCH for another spec or other layers, STALE_INCARNATION if a rank has
  // another holder in the same epoch. Returns RESOURCE_EXHAUSTED (CAPACITY) with the bytes needed, reserved and
  // available. Returns UNAVAILABLE (DRAINING) for a new session on a draining shard, UNAVAILABLE (NOT_ACTIVE) if the
  // session is moving to or from quarantine, and DATA_LOSS if it cannot be restored from quarantine, where it then
  // stays.
  virtual absl::StatusOr<int64_t> Install(const SessionInstall& install) = 0;
  // Stops accepting frames of earlier epochs, and accepts none of the new epoch before it is installed. Returns the
  // lowest first_step of a new member that this shard no longer keeps. Returns nullopt if it keeps all of them, or if
  // the epoch is already installed. Returns NOT_FOUND (UNKNOWN_SESSION) or FAILED_PRECONDITION (STALE_EPOCH).
  virtual absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) = 0;
  // Orders the shard's part of a snapshot and returns its progress. Returns INVALID_ARGUMENT if the step has already
  // begun and no such part exists, FAILED_PRECONDITION if the shard has no data directory (a restored part
  // needs none) or has lost an order that it had accepted (`repeated`), ABORTED with the reason if the part was given
  // up, NOT_FOUND (UNKNOWN_SESSION).
  virtual absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) {
    return absl::FailedPreconditionError("snapshot: this shard has no data directory");
  }
  // Removes the session and all its data, also from quarantine. Waiting requests get ABORTED. Returns false if the
  // shard does not have the session. For sessions that have ended, and for operators.
  virtual absl::StatusOr<bool> Remove(uint64_t session_id) = 0;
  // Moves a session that the coordinator does not know to quarantine: frees its memory, and keeps its files until the
  // session is installed again or removed, or ShardOptions::quarantine_time is over. Waiting requests get UNAVAILABLE.
  // Without a data directory this is Remove. Returns false if the shard does not have the session, FAILED_PRECONDITION
  // if its log lacks records of the session.
  virtual absl::StatusOr<bool> Quarantine(uint64_t session_id) = 0;
  // Ends the calls in progress and all later calls with CANCELLED. Does nothing for calls within the process.
  virtual void CancelCalls() {}
};

}  // namespace precondor

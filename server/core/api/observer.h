// SPDX-License-Identifier: Apache-2.0
// Notifications of core and of the folders above it. server/metrics turns them into Prometheus series.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"
#include "server/policy/fallback.h"

namespace precondor {

// Receives the notifications of a shard's layers. Observer has the rules for these calls.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  virtual void OnContribution(absl::string_view train_job, ContributionKind kind, int64_t bytes) {}
  virtual void OnDuplicate(absl::string_view train_job, ContributionKind kind) {}
  virtual void OnRejected(absl::string_view train_job, ContributionKind kind, ErrorReason reason) {}
  // `open_for` is the time from the first contribution to the seal of one (step, layer).
  virtual void OnSealed(absl::string_view train_job, ContributionKind kind, absl::Duration open_for) {}
  virtual void OnUpdate(absl::string_view train_job, absl::Duration took, bool ok) {}
  // A shard lacks `updates` updates that are in an answer which a worker has received.
  virtual void OnUpdatesLost(absl::string_view train_job, int64_t updates) {}
  virtual void OnPrecondition(absl::string_view train_job, absl::Duration took) {}
  // The shard has decided the answer to all ranks' gradients, or pulls, of one (step, layer).
  virtual void OnPlan(Decision decision, AnswerCause cause) {}
  virtual void OnResult(absl::string_view train_job, Decision decision, int64_t bytes) {}
  // A worker has received a layer's current factors (FETCH).
  virtual void OnFetch(absl::string_view train_job, int64_t bytes) {}
};

// Observer has the rules for calls. By default every method does nothing.
class ShardObserver {
 public:
  virtual ~ShardObserver() = default;
  // A session of this job was installed on a shard, or removed. Every install is followed by one removal. The removal
  // of an old session can come after the install of a new session of that name.
  virtual void OnSessionInstalled(absl::string_view train_job) {}
  virtual void OnSessionRemoved(absl::string_view train_job) {}
  // Bytes that a session has reserved.
  virtual void OnSessionMemory(absl::string_view train_job, int64_t reserved) {}
  // Ranks that the other ranks have been waiting for longer than is normal; empty when there are none any longer.
  virtual void OnStragglers(absl::string_view train_job, const std::vector<uint32_t>& ranks) {}
  virtual void OnShardSessions(int64_t sessions) {}
  virtual void OnQuarantinedSessions(int64_t sessions) {}
  // Memory for a session, or for a part of it, was reserved, or refused for lack of room.
  virtual void OnAdmission(bool admitted) {}
  virtual void OnReservedBytes(int64_t reserved, int64_t capacity) {}
  // The shard has the device; later with false: a fault has made it unusable.
  virtual void OnDevice(absl::string_view device, bool usable) {}
};

// Observer has the rules for calls. By default every method does nothing.
class StoreObserver {
 public:
  virtual ~StoreObserver() = default;
  // A record of so many bytes was appended to the shard's log, or failed. OnLogStale: a session cannot be restored from
  // the log, or can again.
  virtual void OnLogAppend(int64_t bytes, bool ok) {}
  virtual void OnLogStale(absl::string_view train_job, bool stale) {}
  // The journal lacks gradients of a session, so that a restart would bring it back with an older state, or has a
  // snapshot that holds them.
  virtual void OnGradientsMissing(absl::string_view train_job, bool missing) {}
  // The shard's log was synced; `log_bytes` is the size of its files afterwards.
  virtual void OnLogSync(absl::Duration took, int64_t log_bytes) {}
  // A snapshot was written: duration and size. OnSnapshot follows.
  virtual void OnSnapshotWritten(absl::string_view train_job, absl::Duration took, int64_t bytes) {}
  // A session's snapshot became durable, or was given up.
  virtual void OnSnapshot(absl::string_view train_job, bool ok) {}
};

// How a payload travels between a worker and this process: frames of a stream, or a ring in the memory of a device.
enum class TransferPath : uint8_t { kStream, kRing };
enum class TransferKind : uint8_t { kStatistics, kGradient, kAnswer, kFactors };

// Receives the notifications about payloads in transit. Observer has the rules for these calls.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  // Payload bytes that workers sent to this process, or it sent to them, retransmissions included.
  virtual void OnReceived(TransferPath path, TransferKind kind, int64_t bytes) {}
  virtual void OnSent(TransferPath path, TransferKind kind, int64_t bytes) {}
  // `took` is the time from the first frame of a contribution to its acknowledgement or refusal.
  virtual void OnReceive(absl::Duration took) {}
  // `took` is the time from when an answer waits to be written to a stream until the transport has taken its last
  // frame.
  virtual void OnReply(absl::Duration took) {}
};

// Observer has the rules for calls. By default every method does nothing.
class CoordinatorObserver {
 public:
  virtual ~CoordinatorObserver() = default;
  // A session of this job was opened, or closed.
  virtual void OnSessionOpened(absl::string_view train_job) {}
  virtual void OnSessionClosed(absl::string_view train_job) {}
  virtual void OnCoordinatorSessions(int64_t sessions) {}
  // Number of shards that left the last three probes unanswered; reported when it may have changed.
  virtual void OnUnreachableShards(int64_t shards) {}
  // A snapshot of a whole session became durable on all its shards, or failed.
  virtual void OnSessionSnapshot(absl::string_view train_job, bool complete) {}
  // Greatest step of the session's complete snapshots; also reported when the session is restored from the journal.
  virtual void OnLastSessionSnapshot(absl::string_view train_job, uint64_t step) {}
  // The coordinator's journal was written, or could not be written.
  virtual void OnJournal(bool ok) {}
  // The policy's decision after each step that all ranks have reported.
  virtual void OnDecision(absl::string_view train_job, const FallbackDecision& decision) {}
  // A change of mode was written to the journal. It takes effect at a step that no rank has begun.
  virtual void OnModeChange(absl::string_view train_job, Mode mode) {}
  // All ranks have reported `step`. `loss` is not finite if no rank's loss was.
  virtual void OnStepReported(absl::string_view train_job, uint64_t step, double loss, Mode mode) {}
  // The last step that a rank of the session may begin now.
  virtual void OnLease(absl::string_view train_job, uint64_t through_step) {}
  virtual void OnEpoch(absl::string_view train_job, uint64_t epoch, int64_t joined, int64_t world_size) {}
};

// Receives all notifications; each part of the server takes only the interface of its own notifications. A call must be
// cheap, and must neither block nor call back: it comes from any thread, possibly under a lock of core. Every method
// does nothing by default. A notification about a job may arrive after the job's session has been removed, because an
// update that was under way ends later.
class Observer : public LayerObserver,
                 public ShardObserver,
                 public StoreObserver,
                 public TransferObserver,
                 public CoordinatorObserver {};

}  // namespace precondor

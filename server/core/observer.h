// SPDX-License-Identifier: Apache-2.0
// What core tells the outside as it happens; server/metrics turns it into Prometheus series. Calls are cheap, come
// from any thread, possibly under a core lock, and must not call back. Every method does nothing by default.
// What concerns a job may still come when it is no longer there: an update that was under way ends later.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "server/core/contribution.h"
#include "server/policy/fallback.h"

namespace precondor {

// How a payload travels between a worker and this process: frames of a stream, a unary call, a ring in the memory of a
// device, or a communicator.
enum class TransferPath : uint8_t { kStream, kUnary, kRing, kCollective };
enum class TransferKind : uint8_t { kStatistics, kGradient, kAnswer, kFactors };

class Observer {
 public:
  virtual ~Observer() = default;
  // Payload bytes that workers sent to this process, or it sent to them, retransmissions included.
  virtual void OnReceived(TransferPath path, TransferKind kind, int64_t bytes) {}
  virtual void OnSent(TransferPath path, TransferKind kind, int64_t bytes) {}
  // From the first frame of a contribution to its acknowledgement or refusal.
  virtual void OnReceive(absl::Duration took) {}
  // From the time that an answer waits to be written to a stream until the transport has taken its last frame.
  virtual void OnReply(absl::Duration took) {}
  // A shard has a session of this job, or no longer. The removal of an old session may come after the installation of
  // a new one with its name; each installation has one removal, later.
  virtual void OnSessionInstalled(absl::string_view train_job) {}
  virtual void OnSessionRemoved(absl::string_view train_job) {}
  virtual void OnContribution(absl::string_view train_job, ContributionKind kind, int64_t bytes) {}
  virtual void OnDuplicate(absl::string_view train_job, ContributionKind kind) {}
  virtual void OnRejected(absl::string_view train_job, ContributionKind kind, ErrorReason reason) {}
  // First contribution to seal of one (step, layer).
  virtual void OnSealed(absl::string_view train_job, ContributionKind kind, absl::Duration open_for) {}
  virtual void OnUpdate(absl::string_view train_job, absl::Duration took, bool ok) {}
  // A shard came back without this many updates that workers have had answers of.
  virtual void OnUpdatesLost(absl::string_view train_job, int64_t updates) {}
  virtual void OnPrecondition(absl::string_view train_job, absl::Duration took) {}
  virtual void OnResult(absl::string_view train_job, Decision decision, int64_t bytes) {}
  // A worker was given a layer's factors as they are (FETCH).
  virtual void OnFetch(absl::string_view train_job, int64_t bytes) {}
  // The part of what follows that a session needs in first order too.
  virtual void OnSessionGradientMemory(absl::string_view train_job, int64_t reserved) {}
  // What a session has reserved on a shard: once installed, and when its factors are released or begin anew.
  virtual void OnSessionMemory(absl::string_view train_job, int64_t reserved) {}
  // On all devices of a shard together, and on each, by its name.
  virtual void OnReservedBytes(int64_t reserved, int64_t capacity) {}
  virtual void OnDeviceMemory(absl::string_view device, int64_t reserved, int64_t capacity) {}
  // A shard has the device; later, not: a fault has ended its use.
  virtual void OnDevice(absl::string_view device, bool usable) {}
  virtual void OnShardSessions(int64_t sessions) {}
  // A reservation of a session's memory, or of part of it, was granted or refused for want of room.
  virtual void OnAdmission(bool admitted) {}
  virtual void OnQuarantinedSessions(int64_t sessions) {}
  // Ranks that the others have been waiting for, for longer than is normal; empty once they are not.
  virtual void OnStragglers(absl::string_view train_job, const std::vector<uint32_t>& ranks) {}
  // A shard's log took a record of so many bytes, or failed; a session cannot come back from it, or can again.
  virtual void OnLogAppend(int64_t bytes, bool ok) {}
  virtual void OnLogStale(absl::string_view train_job, bool stale) {}
  // One sync of the shard's log, and how many bytes its files then have.
  virtual void OnLogSync(absl::Duration took, int64_t log_bytes) {}
  // A snapshot was written just now: what it took, and its size. OnSnapshot follows.
  virtual void OnSnapshotWritten(absl::string_view train_job, absl::Duration took, int64_t bytes) {}
  // A session's snapshot became durable, or was given up.
  virtual void OnSnapshot(absl::string_view train_job, bool ok) {}
  // Released factors of a session became durable, or an attempt failed and will be made again.
  virtual void OnFactorsKept(absl::string_view train_job, bool ok) {}
  // A session's factors are needed again: so many layers have those that were kept, so many fresh ones.
  virtual void OnFactorsReturned(absl::string_view train_job, int64_t kept_layers, int64_t fresh_layers) {}
  // A session's ranks and this shard have a communicator for its gradients, or none any more; one has ended before its
  // epoch, and no rank had left.
  virtual void OnDataPlane(absl::string_view train_job, bool joined) {}
  virtual void OnDataPlaneFailure(absl::string_view train_job) {}
  // Coordinator.
  virtual void OnSessionOpened(absl::string_view train_job) {}
  virtual void OnSessionClosed(absl::string_view train_job) {}
  virtual void OnCoordinatorSessions(int64_t sessions) {}
  // How many shards have left the last three probes unanswered, when that number may have changed.
  virtual void OnUnreachableShards(int64_t shards) {}
  // Layers of a session began anew on other shards, because theirs was lost.
  virtual void OnLayersMoved(absl::string_view train_job, int64_t layers) {}
  // A snapshot of a whole session is durable on all its shards, or has failed.
  virtual void OnSessionSnapshot(absl::string_view train_job, bool complete) {}
  // The greatest step of those that are complete; also of a session that comes back from the journal.
  virtual void OnLastSessionSnapshot(absl::string_view train_job, uint64_t step) {}
  // The coordinator's journal was written, or could not be.
  virtual void OnJournal(bool ok) {}
  // What a session's policy decided on, after each step that all ranks have reported.
  virtual void OnDecision(absl::string_view train_job, const FallbackDecision& decision) {}
  // A change of mode has been written down; it holds from a step that no rank has begun.
  virtual void OnModeChange(absl::string_view train_job, Mode mode) {}
  // All ranks have reported `step`; `loss` is not finite when none of theirs was.
  virtual void OnStepReported(absl::string_view train_job, uint64_t step, double loss, Mode mode) {}
  // The last step that any rank of the session may begin now.
  virtual void OnLease(absl::string_view train_job, uint64_t through_step) {}
  virtual void OnEpoch(absl::string_view train_job, uint64_t epoch, int64_t joined, int64_t world_size) {}
};

}  // namespace precondor

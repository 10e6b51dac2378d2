// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/convert.h"
#include "server/rpc/services.h"

namespace precondor::rpc {
namespace {

absl::Status CreateSnapshot(const v1::CreateSnapshotRequest& request, v1::CreateSnapshotResponse& response,
                            const SnapshotSubject& subject) {
  if (subject.coordinator == nullptr) {
    return absl::FailedPreconditionError("snapshot create: expected a coordinator, got a shard");
  }
  PRECONDOR_ASSIGN_OR_RETURN(const SnapshotEntry begun, subject.coordinator->CreateSnapshot(request.session()));
  response.set_snapshot_id(begun.number);
  response.set_step(begun.step);
  return absl::OkStatus();
}

absl::Status ListSnapshots(const v1::ListSnapshotsRequest&, v1::ListSnapshotsResponse& response,
                           const SnapshotSubject& subject) {
  if (subject.list) {
    PRECONDOR_ASSIGN_OR_RETURN(std::vector<v1::SnapshotInfo> snapshots, subject.list());
    for (v1::SnapshotInfo& snapshot : snapshots) *response.add_snapshots() = std::move(snapshot);
  }
  if (subject.coordinator == nullptr) return absl::OkStatus();
  for (const CoordinatorSessionSummary& session : subject.coordinator->ListSessions()) {
    for (const SnapshotEntry& snapshot : session.snapshots) {
      *response.add_session_snapshots() = EncodeSnapshot(session, snapshot);
    }
  }
  return absl::OkStatus();
}

absl::Status VerifySnapshot(const v1::VerifySnapshotRequest& request, v1::VerifySnapshotResponse& response,
                            const SnapshotSubject& subject) {
  if (!subject.verify) return absl::FailedPreconditionError("snapshot: shards have them, this is no shard");
  PRECONDOR_ASSIGN_OR_RETURN(*response.mutable_snapshot(), subject.verify(request.session_id(), request.snapshot_id()));
  return absl::OkStatus();
}
// Runs one verification at a time: each reads the disk and holds a layer in memory.
std::string VerifyKey(const v1::VerifySnapshotRequest&) { return "verify"; }

absl::Status RestoreSession(const v1::RestoreSessionRequest& request, v1::RestoreSessionResponse& response,
                            const SnapshotSubject& subject, const grpc::CallbackServerContext& context) {
  if (subject.coordinator == nullptr) {
    return absl::FailedPreconditionError("restore: a coordinator opens the session, this is none");
  }
  PRECONDOR_ASSIGN_OR_RETURN(const SessionSpec spec, wire::DecodeSessionSpec(request.spec()));
  // A session that an operator restores is for every worker; a job's own is for its tenant.
  const SessionCaller caller = subject.caller(context);
  const bool for_every_worker = caller.is_operator && !caller.is_worker;
  PRECONDOR_ASSIGN_OR_RETURN(
      const RestoreResult restored,
      subject.coordinator->RestoreSession(
          spec, request.step(), for_every_worker ? SessionCaller() : caller,
          std::vector<std::string>(request.rank_devices().begin(), request.rank_devices().end())));
  const CoordinatorSessionSummary& opened = restored.session;
  response.set_session_id(opened.session_id);
  response.set_snapshot_id(opened.snapshots.back().number);
  *response.mutable_shard_map() = EncodeShardMap(opened.epoch, opened.shard_map);
  response.set_secret(restored.secret);
  return absl::OkStatus();
}
std::string RestoreKey(const v1::RestoreSessionRequest& request) { return SessionKey(request.spec().name()); }

absl::Status RestoreLayer(const v1::RestoreLayerRequest& request, v1::RestoreLayerResponse& response,
                          const SnapshotSubject& subject) {
  if (!subject.restore) return absl::FailedPreconditionError("restore: shards take layers, this is none");
  PRECONDOR_ASSIGN_OR_RETURN(const bool restored, subject.restore(request));
  response.set_restored(restored);
  return absl::OkStatus();
}

}  // namespace

SnapshotService::SnapshotService(SnapshotSubject subject, ControlRunner& runner)
    : ControlService(runner), subject_(std::move(subject)) {
  Serve(CreateSnapshot, subject_);
  Serve(ListSnapshots, subject_);
  ServeInOrder(VerifyKey, VerifySnapshot, subject_);
  ServeInOrder(RestoreKey, RestoreSession, subject_);
  Serve(RestoreLayer, subject_);
}

}  // namespace precondor::rpc

// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/snapshot_service.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {

absl::Status SnapshotService::Create(const v1::CreateSnapshotRequest& request,
                                     v1::CreateSnapshotResponse& response) const {
  response.set_step(request.step());
  if (request.step() != 0 && subject_.create) return subject_.create(request.session(), request.step());
  if (request.step() != 0 || subject_.coordinator == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step: ", request.step() == 0 ? "a shard expects one that no rank has begun, got 0"
                                      : absl::StrCat("a coordinator chooses it, expected 0, got ", request.step())));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const SnapshotEntry begun, subject_.coordinator->CreateSnapshot(request.session()));
  response.set_snapshot_id(begun.number);
  response.set_step(begun.step);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* SnapshotService::CreateSnapshot(grpc::CallbackServerContext* context,
                                                          const v1::CreateSnapshotRequest* request,
                                                          v1::CreateSnapshotResponse* response) {
  return runner_.Run(context, "SnapshotService/CreateSnapshot",
                     [this, request, response] { return Create(*request, *response); });
}

grpc::ServerUnaryReactor* SnapshotService::ListSnapshots(grpc::CallbackServerContext* context,
                                                         const v1::ListSnapshotsRequest*,
                                                         v1::ListSnapshotsResponse* response) {
  return runner_.Run(context, "SnapshotService/ListSnapshots", [this, response]() -> absl::Status {
    if (subject_.list) {
      PRECONDOR_ASSIGN_OR_RETURN(std::vector<v1::SnapshotInfo> snapshots, subject_.list());
      for (v1::SnapshotInfo& snapshot : snapshots) *response->add_snapshots() = std::move(snapshot);
    }
    if (subject_.coordinator == nullptr) return absl::OkStatus();
    for (const CoordinatorSessionSummary& session : subject_.coordinator->ListSessions()) {
      for (const SnapshotEntry& snapshot : session.snapshots) {
        *response->add_session_snapshots() = EncodeSnapshot(session, snapshot);
      }
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* SnapshotService::VerifySnapshot(grpc::CallbackServerContext* context,
                                                          const v1::VerifySnapshotRequest* request,
                                                          v1::VerifySnapshotResponse* response) {
  // Runs one verification at a time: each reads the disk and holds a layer in memory.
  return runner_.RunInOrder(
      context, "SnapshotService/VerifySnapshot", "verify", [this, request, response]() -> absl::Status {
        if (!subject_.verify) return absl::FailedPreconditionError("snapshot: shards have them, this is no shard");
        PRECONDOR_ASSIGN_OR_RETURN(*response->mutable_snapshot(),
                                   subject_.verify(request->session_id(), request->snapshot_id()));
        return absl::OkStatus();
      });
}

absl::Status SnapshotService::Restore(const v1::RestoreSessionRequest& request, const SessionCaller& caller,
                                      v1::RestoreSessionResponse& response) const {
  if (subject_.coordinator == nullptr) {
    return absl::FailedPreconditionError("restore: a coordinator opens the session, this is none");
  }
  PRECONDOR_ASSIGN_OR_RETURN(const SessionSpec spec, wire::DecodeSessionSpec(request.spec()));
  // A session that an operator restores is for every worker; a job's own is for its tenant.
  const bool for_every_worker = caller.is_operator && !caller.is_worker;
  PRECONDOR_ASSIGN_OR_RETURN(
      const RestoreResult restored,
      subject_.coordinator->RestoreSession(
          spec, request.step(), for_every_worker ? SessionCaller() : caller,
          std::vector<std::string>(request.rank_devices().begin(), request.rank_devices().end())));
  const CoordinatorSessionSummary& opened = restored.session;
  response.set_session_id(opened.session_id);
  response.set_snapshot_id(opened.snapshots.back().number);
  *response.mutable_shard_map() = EncodeShardMap(opened.epoch, opened.shard_map);
  response.set_secret(restored.secret);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* SnapshotService::RestoreSession(grpc::CallbackServerContext* context,
                                                          const v1::RestoreSessionRequest* request,
                                                          v1::RestoreSessionResponse* response) {
  return runner_.RunInOrder(
      context, "SnapshotService/RestoreSession", SessionKey(request->spec().name()),
      [this, context, request, response] { return Restore(*request, caller_(*context), *response); });
}

grpc::ServerUnaryReactor* SnapshotService::RestoreLayer(grpc::CallbackServerContext* context,
                                                        const v1::RestoreLayerRequest* request,
                                                        v1::RestoreLayerResponse* response) {
  return runner_.Run(context, "SnapshotService/RestoreLayer", [this, request, response]() -> absl::Status {
    if (!subject_.restore) return absl::FailedPreconditionError("restore: shards take layers, this is none");
    PRECONDOR_ASSIGN_OR_RETURN(const bool restored, subject_.restore(*request));
    response->set_restored(restored);
    return absl::OkStatus();
  });
}

}  // namespace precondor::rpc

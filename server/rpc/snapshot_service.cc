// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/snapshot_service.h"

#include "kernels/base/status_macros.h"

namespace precondor::rpc {

grpc::ServerUnaryReactor* SnapshotService::CreateSnapshot(grpc::CallbackServerContext* context,
                                                          const v1::CreateSnapshotRequest* request,
                                                          v1::CreateSnapshotResponse*) {
  return runner_.RunNow(context, "SnapshotService/CreateSnapshot",
                        [this, request] { return subject_.create(request->session(), request->step()); });
}

grpc::ServerUnaryReactor* SnapshotService::ListSnapshots(grpc::CallbackServerContext* context,
                                                         const v1::ListSnapshotsRequest*,
                                                         v1::ListSnapshotsResponse* response) {
  return runner_.Run(context, "SnapshotService/ListSnapshots", [this, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(std::vector<v1::SnapshotInfo> snapshots, subject_.list());
    for (v1::SnapshotInfo& snapshot : snapshots) *response->add_snapshots() = std::move(snapshot);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* SnapshotService::VerifySnapshot(grpc::CallbackServerContext* context,
                                                          const v1::VerifySnapshotRequest* request,
                                                          v1::VerifySnapshotResponse* response) {
  return runner_.Run(context, "SnapshotService/VerifySnapshot", [this, request, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(*response->mutable_snapshot(),
                               subject_.verify(request->session_id(), request->snapshot_id()));
    return absl::OkStatus();
  });
}

}  // namespace precondor::rpc

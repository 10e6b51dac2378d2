// SPDX-License-Identifier: Apache-2.0
// SnapshotService over whatever keeps a shard's snapshots, a coordinator that has sessions' taken, or both.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "precondor/v1/snapshot.grpc.pb.h"
#include "server/core/coordinator/coordinator.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Thread-safe functions, with the errors of the service. Those of a role that the server has not are empty.
struct SnapshotSubject {
  Coordinator* coordinator = nullptr;
  std::function<absl::Status(const std::string& session, uint64_t step)> create;
  std::function<absl::StatusOr<std::vector<v1::SnapshotInfo>>()> list;
  std::function<absl::StatusOr<v1::SnapshotInfo>(uint64_t session_id, uint64_t snapshot_id)> verify;
  // True: with this piece the layer has the factors.
  std::function<absl::StatusOr<bool>(const v1::RestoreLayerRequest& piece)> restore;
};

// Thread-safe. `runner` and what the subject uses outlive the service.
class SnapshotService final : public v1::SnapshotService::CallbackService {
 public:
  SnapshotService(SnapshotSubject subject, ControlRunner& runner) : subject_(std::move(subject)), runner_(runner) {}

  grpc::ServerUnaryReactor* CreateSnapshot(grpc::CallbackServerContext* context,
                                           const v1::CreateSnapshotRequest* request,
                                           v1::CreateSnapshotResponse* response) override;
  grpc::ServerUnaryReactor* ListSnapshots(grpc::CallbackServerContext* context, const v1::ListSnapshotsRequest* request,
                                          v1::ListSnapshotsResponse* response) override;
  grpc::ServerUnaryReactor* VerifySnapshot(grpc::CallbackServerContext* context,
                                           const v1::VerifySnapshotRequest* request,
                                           v1::VerifySnapshotResponse* response) override;
  grpc::ServerUnaryReactor* RestoreSession(grpc::CallbackServerContext* context,
                                           const v1::RestoreSessionRequest* request,
                                           v1::RestoreSessionResponse* response) override;
  grpc::ServerUnaryReactor* RestoreLayer(grpc::CallbackServerContext* context, const v1::RestoreLayerRequest* request,
                                         v1::RestoreLayerResponse* response) override;

 private:
  absl::Status Restore(const v1::RestoreSessionRequest& request, v1::RestoreSessionResponse& response) const;
  absl::Status Create(const v1::CreateSnapshotRequest& request, v1::CreateSnapshotResponse& response) const;

  const SnapshotSubject subject_;
  ControlRunner& runner_;
};

}  // namespace precondor::rpc

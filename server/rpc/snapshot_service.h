// SPDX-License-Identifier: Apache-2.0
// SnapshotService: lets operators take, list, verify and restore snapshots on a shard, a coordinator or both, and
// workers restore what they have read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "precondor/v1/snapshot.grpc.pb.h"
#include "server/core/coordinator/coordinator.h"
#include "server/rpc/bounded_handler.h"
#include "server/rpc/session_service.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// What the service calls. The functions are thread-safe and return the service's errors. `coordinator` is null if the
// server is not a coordinator; the functions are empty if it is not a shard.
struct SnapshotSubject {
  Coordinator* coordinator = nullptr;
  std::function<absl::Status(const std::string& session, uint64_t step)> create;
  std::function<absl::StatusOr<std::vector<v1::SnapshotInfo>>()> list;
  std::function<absl::StatusOr<v1::SnapshotInfo>(uint64_t session_id, uint64_t snapshot_id)> verify;
  // Returns true if this piece has completed the layer, which now has the factors.
  std::function<absl::StatusOr<bool>(const v1::RestoreLayerRequest& piece)> restore;
};

// Implements v1.SnapshotService for a SnapshotSubject. Thread-safe. Lifetime: `runner` and the objects that the subject
// uses outlive the service.
class SnapshotService final : public v1::SnapshotService::CallbackService {
 public:
  SnapshotService(SnapshotSubject subject, ControlRunner& runner, CallerFn caller)
      : subject_(std::move(subject)), runner_(runner), caller_(std::move(caller)) {
    const auto bound = [&](absl::string_view name, auto method) {
      MarkMethodCallback(MethodIndex(name), BoundedHandler(runner, name, WithinBudget(runner, name), this, method));
    };
    bound("SnapshotService/CreateSnapshot", &SnapshotService::CreateSnapshot);
    bound("SnapshotService/ListSnapshots", &SnapshotService::ListSnapshots);
    bound("SnapshotService/VerifySnapshot", &SnapshotService::VerifySnapshot);
    bound("SnapshotService/RestoreSession", &SnapshotService::RestoreSession);
    bound("SnapshotService/RestoreLayer", &SnapshotService::RestoreLayer);
  }

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
  absl::Status Restore(const v1::RestoreSessionRequest& request, const SessionCaller& caller,
                       v1::RestoreSessionResponse& response) const;
  absl::Status Create(const v1::CreateSnapshotRequest& request, v1::CreateSnapshotResponse& response) const;

  const SnapshotSubject subject_;
  ControlRunner& runner_;
  const CallerFn caller_;
};

}  // namespace precondor::rpc

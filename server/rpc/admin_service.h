// SPDX-License-Identifier: Apache-2.0
// AdminService: lets operators inspect and control one process of any role.
#pragma once

#include <functional>
#include <string>

#include "precondor/v1/admin.grpc.pb.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/shard/shard.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// The process that the service reports on. `shard` or `coordinator` is null if the process does not have that role.
// Lifetime: the objects outlive the service.
struct AdminSubject {
  std::string version;
  v1::Role role = v1::ROLE_UNSPECIFIED;
  std::string backend;
  Shard* shard = nullptr;
  Coordinator* coordinator = nullptr;
  std::function<bool()> draining;
  std::function<void(absl::Duration deadline)> begin_drain;  // zero means the server's configured deadline
};

// Implements v1.AdminService for an AdminSubject. Thread-safe.
class AdminService final : public v1::AdminService::CallbackService {
 public:
  AdminService(AdminSubject subject, ControlRunner& runner);

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context, const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context, const v1::ListSessionsRequest* request,
                                         v1::ListSessionsResponse* response) override;
  grpc::ServerUnaryReactor* GetLayerStats(grpc::CallbackServerContext* context, const v1::GetLayerStatsRequest* request,
                                          v1::GetLayerStatsResponse* response) override;
  grpc::ServerUnaryReactor* GetMode(grpc::CallbackServerContext* context, const v1::GetModeRequest* request,
                                    v1::GetModeResponse* response) override;
  grpc::ServerUnaryReactor* SetMode(grpc::CallbackServerContext* context, const v1::SetModeRequest* request,
                                    v1::SetModeResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;

 private:
  // Returns NOT_FOUND (UNKNOWN_SESSION) if this process is not a coordinator.
  absl::Status CheckCoordinator(const std::string& session) const;
  // Adds the sessions of the shard and of the coordinator, merged by name and in the order of their names.
  absl::Status Summarize(v1::ListSessionsResponse& response) const;

  const AdminSubject subject_;
  ControlRunner& runner_;
  const absl::Time start_;
};

}  // namespace precondor::rpc

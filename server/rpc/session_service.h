// SPDX-License-Identifier: Apache-2.0
// SessionService over a Coordinator.
#pragma once

#include "precondor/v1/session.grpc.pb.h"
#include "server/core/coordinator.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Thread-safe. Both references outlive the service.
class SessionService final : public v1::SessionService::CallbackService {
 public:
  SessionService(Coordinator& coordinator, ControlRunner& runner) : coordinator_(coordinator), runner_(runner) {}

  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* context, const v1::OpenSessionRequest* request,
                                        v1::OpenSessionResponse* response) override;
  grpc::ServerUnaryReactor* JoinSession(grpc::CallbackServerContext* context, const v1::JoinSessionRequest* request,
                                        v1::JoinSessionResponse* response) override;
  grpc::ServerUnaryReactor* ReportStep(grpc::CallbackServerContext* context, const v1::ReportStepRequest* request,
                                       v1::ReportStepResponse* response) override;
  grpc::ServerUnaryReactor* LeaveSession(grpc::CallbackServerContext* context, const v1::LeaveSessionRequest* request,
                                         v1::LeaveSessionResponse* response) override;
  grpc::ServerUnaryReactor* CloseSession(grpc::CallbackServerContext* context, const v1::CloseSessionRequest* request,
                                         v1::CloseSessionResponse* response) override;

 private:
  Coordinator& coordinator_;
  ControlRunner& runner_;
};

}  // namespace precondor::rpc

// SPDX-License-Identifier: Apache-2.0
// ShardService: the calls by which a coordinator controls a shard.
#pragma once

#include <functional>

#include "precondor/v1/shard.grpc.pb.h"
#include "server/core/shard/shard.h"
#include "server/rpc/bounded_handler.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Implements v1.ShardService for a Shard. Thread-safe. Lifetime: both references outlive the service.
class ShardService final : public v1::ShardService::CallbackService {
 public:
  ShardService(Shard& shard, ControlRunner& runner) : shard_(shard), runner_(runner) {
    const auto bound = [&](absl::string_view name, auto method) {
      MarkMethodCallback(MethodIndex(name), BoundedHandler(runner, name, WithinBudget(runner, name), this, method));
    };
    bound("ShardService/DescribeShard", &ShardService::DescribeShard);
    bound("ShardService/InstallSession", &ShardService::InstallSession);
    bound("ShardService/FenceSession", &ShardService::FenceSession);
    bound("ShardService/HoldFactors", &ShardService::HoldFactors);
    bound("ShardService/TakeSnapshot", &ShardService::TakeSnapshot);
    bound("ShardService/RemoveSession", &ShardService::RemoveSession);
    bound("ShardService/QuarantineSession", &ShardService::QuarantineSession);
  }

  grpc::ServerUnaryReactor* DescribeShard(grpc::CallbackServerContext* context, const v1::DescribeShardRequest* request,
                                          v1::DescribeShardResponse* response) override;
  grpc::ServerUnaryReactor* InstallSession(grpc::CallbackServerContext* context,
                                           const v1::InstallSessionRequest* request,
                                           v1::InstallSessionResponse* response) override;
  grpc::ServerUnaryReactor* FenceSession(grpc::CallbackServerContext* context, const v1::FenceSessionRequest* request,
                                         v1::FenceSessionResponse* response) override;
  grpc::ServerUnaryReactor* HoldFactors(grpc::CallbackServerContext* context, const v1::HoldFactorsRequest* request,
                                        v1::HoldFactorsResponse* response) override;
  grpc::ServerUnaryReactor* TakeSnapshot(grpc::CallbackServerContext* context, const v1::TakeSnapshotRequest* request,
                                         v1::TakeSnapshotResponse* response) override;
  grpc::ServerUnaryReactor* RemoveSession(grpc::CallbackServerContext* context, const v1::RemoveSessionRequest* request,
                                          v1::RemoveSessionResponse* response) override;
  grpc::ServerUnaryReactor* QuarantineSession(grpc::CallbackServerContext* context,
                                              const v1::QuarantineSessionRequest* request,
                                              v1::QuarantineSessionResponse* response) override;

 private:
  // Runs `work` if the shard's FencingGate admits the request's fencing token.
  template <typename Request>
  grpc::ServerUnaryReactor* RunAdmitted(grpc::CallbackServerContext* context, absl::string_view method,
                                        const Request& request, std::function<absl::Status()> work);

  Shard& shard_;
  ControlRunner& runner_;
};

}  // namespace precondor::rpc

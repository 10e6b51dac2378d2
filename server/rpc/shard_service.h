// SPDX-License-Identifier: Apache-2.0
// ShardService: a coordinator's side door to a shard.
#pragma once

#include "precondor/v1/shard.grpc.pb.h"
#include "server/core/shard_control.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Thread-safe. Both references outlive the service.
class ShardService final : public v1::ShardService::CallbackService {
 public:
  ShardService(ShardControl& shard, ControlRunner& runner) : shard_(shard), runner_(runner) {}

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

 private:
  ShardControl& shard_;
  ControlRunner& runner_;
};

}  // namespace precondor::rpc

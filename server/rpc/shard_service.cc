// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/shard_service.h"

#include <type_traits>
#include <utility>

#include "kernels/base/status_macros.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {

template <typename Request>
grpc::ServerUnaryReactor* ShardService::RunAdmitted(grpc::CallbackServerContext* context, absl::string_view method,
                                                    const Request& request, std::function<absl::Status()> work) {
  const uint64_t token = request.fencing_token();
  auto admitted = [this, token, work = std::move(work)]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const FencingGate::Pass pass, shard_.Admit(token));
    return work();
  };
  // Answers probes on gRPC's thread if possible, so that they do not wait behind blocking calls.
  constexpr bool kProbe = std::is_same_v<Request, v1::DescribeShardRequest>;
  if (kProbe && shard_.AdmitsAtOnce(token)) return runner_.RunNow(context, method, admitted);
  return runner_.Run(context, method, std::move(admitted));
}

grpc::ServerUnaryReactor* ShardService::DescribeShard(grpc::CallbackServerContext* context,
                                                      const v1::DescribeShardRequest* request,
                                                      v1::DescribeShardResponse* response) {
  return RunAdmitted(context, "ShardService/DescribeShard", *request, [this, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const ShardDescription description, shard_.Describe());
    *response = EncodeDescription(description);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::InstallSession(grpc::CallbackServerContext* context,
                                                       const v1::InstallSessionRequest* request,
                                                       v1::InstallSessionResponse* response) {
  return RunAdmitted(context, "ShardService/InstallSession", *request, [this, request, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const SessionInstall install, DecodeInstall(*request));
    PRECONDOR_ASSIGN_OR_RETURN(const int64_t reserved, shard_.Install(install));
    response->set_reserved_bytes(static_cast<uint64_t>(reserved));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::FenceSession(grpc::CallbackServerContext* context,
                                                     const v1::FenceSessionRequest* request,
                                                     v1::FenceSessionResponse* response) {
  return RunAdmitted(context, "ShardService/FenceSession", *request, [this, request, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const EpochFence fence, DecodeFence(*request));
    PRECONDOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> gone, shard_.Fence(fence));
    response->set_must_roll_back(gone.has_value());
    response->set_step(gone.value_or(0));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::HoldFactors(grpc::CallbackServerContext* context,
                                                    const v1::HoldFactorsRequest* request, v1::HoldFactorsResponse*) {
  return RunAdmitted(context, "ShardService/HoldFactors", *request, [this, request] {
    return shard_.HoldFactors(
        {.session_id = request->session_id(), .version = request->version(), .hold = request->hold()});
  });
}

grpc::ServerUnaryReactor* ShardService::TakeSnapshot(grpc::CallbackServerContext* context,
                                                     const v1::TakeSnapshotRequest* request,
                                                     v1::TakeSnapshotResponse* response) {
  return RunAdmitted(context, "ShardService/TakeSnapshot", *request, [this, request, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const SnapshotProgress progress, shard_.TakeSnapshot(DecodeOrder(*request)));
    response->set_begun(progress.begun);
    response->set_durable(progress.durable);
    response->set_snapshot_id(progress.snapshot_id);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::RemoveSession(grpc::CallbackServerContext* context,
                                                      const v1::RemoveSessionRequest* request,
                                                      v1::RemoveSessionResponse* response) {
  return RunAdmitted(context, "ShardService/RemoveSession", *request, [this, request, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const bool existed, shard_.Remove(request->session_id()));
    response->set_existed(existed);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::QuarantineSession(grpc::CallbackServerContext* context,
                                                          const v1::QuarantineSessionRequest* request,
                                                          v1::QuarantineSessionResponse* response) {
  return RunAdmitted(context, "ShardService/QuarantineSession", *request, [this, request, response]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const bool existed, shard_.Quarantine(request->session_id()));
    response->set_existed(existed);
    return absl::OkStatus();
  });
}

}  // namespace precondor::rpc

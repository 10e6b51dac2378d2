// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <type_traits>
#include <utility>

#include "kernels/base/status_macros.h"
#include "precondor/v1/shard.pb.h"
#include "server/rpc/convert.h"
#include "server/rpc/services.h"

namespace precondor::rpc {
namespace {

absl::Status DescribeShard(const v1::DescribeShardRequest&, v1::DescribeShardResponse& response, Shard& shard) {
  PRECONDOR_ASSIGN_OR_RETURN(const ShardDescription description, shard.Describe());
  response = EncodeDescription(description);
  return absl::OkStatus();
}

absl::Status InstallSession(const v1::InstallSessionRequest& request, v1::InstallSessionResponse& response,
                            Shard& shard) {
  PRECONDOR_ASSIGN_OR_RETURN(const SessionInstall install, DecodeInstall(request));
  PRECONDOR_ASSIGN_OR_RETURN(const int64_t reserved, shard.Install(install));
  response.set_reserved_bytes(static_cast<uint64_t>(reserved));
  return absl::OkStatus();
}

absl::Status FenceSession(const v1::FenceSessionRequest& request, v1::FenceSessionResponse& response, Shard& shard) {
  PRECONDOR_ASSIGN_OR_RETURN(const EpochFence fence, DecodeFence(request));
  PRECONDOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> gone, shard.Fence(fence));
  response.set_must_roll_back(gone.has_value());
  response.set_step(gone.value_or(0));
  return absl::OkStatus();
}

absl::Status TakeSnapshot(const v1::TakeSnapshotRequest& request, v1::TakeSnapshotResponse& response, Shard& shard) {
  PRECONDOR_ASSIGN_OR_RETURN(const SnapshotProgress progress, shard.TakeSnapshot(DecodeOrder(request)));
  response.set_begun(progress.begun);
  response.set_durable(progress.durable);
  response.set_snapshot_id(progress.snapshot_id);
  return absl::OkStatus();
}

absl::Status RemoveSession(const v1::RemoveSessionRequest& request, v1::RemoveSessionResponse& response, Shard& shard) {
  PRECONDOR_ASSIGN_OR_RETURN(const bool existed, shard.Remove(request.session_id()));
  response.set_existed(existed);
  return absl::OkStatus();
}

absl::Status QuarantineSession(const v1::QuarantineSessionRequest& request, v1::QuarantineSessionResponse& response,
                               Shard& shard) {
  PRECONDOR_ASSIGN_OR_RETURN(const bool existed, shard.Quarantine(request.session_id()));
  response.set_existed(existed);
  return absl::OkStatus();
}

}  // namespace

ShardService::ShardService(Shard& shard, ControlRunner& runner) : ControlService(runner) {
  const auto run_admitted = [this, &shard](auto* context, absl::string_view method, const auto& request,
                                           std::function<absl::Status()> work) {
    const uint64_t token = request.fencing_token();
    auto admitted = [&shard, token, work = std::move(work)]() -> absl::Status {
      PRECONDOR_ASSIGN_OR_RETURN(const FencingGate::Pass pass, shard.Admit(token));
      return work();
    };
    // Answers probes on gRPC's thread if possible, so that they do not wait behind blocking calls.
    constexpr bool kProbe = std::is_same_v<decltype(request), const v1::DescribeShardRequest&>;
    if (kProbe && shard.AdmitsAtOnce(token)) return runner_.RunNow(context, method, admitted);
    return runner_.Run(context, method, std::move(admitted));
  };
  ServeBy(run_admitted, DescribeShard, shard);
  ServeBy(run_admitted, InstallSession, shard);
  ServeBy(run_admitted, FenceSession, shard);
  ServeBy(run_admitted, TakeSnapshot, shard);
  ServeBy(run_admitted, RemoveSession, shard);
  ServeBy(run_admitted, QuarantineSession, shard);
}

}  // namespace precondor::rpc

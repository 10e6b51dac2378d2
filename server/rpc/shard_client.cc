// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/shard_client.h"

#include <algorithm>
#include <atomic>
#include <grpcpp/grpcpp.h>
#include <type_traits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace_context.h"
#include "kernels/base/unix_address.h"
#include "precondor/v1/shard.grpc.pb.h"
#include "proto/wire/channel.h"
#include "proto/wire/status_codec.h"
#include "server/rpc/convert.h"
#include "server/trace/tracer.h"

namespace precondor::rpc {
namespace {

// Longest deadline of a probe, so that an unreachable shard does not delay the probes of other shards.
constexpr absl::Duration kProbeTimeout = absl::Seconds(1);

// Short reconnect delays let the coordinator reach a restarted shard quickly.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const wire::ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
  wire::SetKeepalive(arguments);
  return wire::MakeDirectChannel(DialTarget(address), security.CredentialsFor(address), arguments);
}

class ShardClient final : public ShardControl {
 public:
  ShardClient(std::string address, absl::Duration timeout, const wire::ChannelSecurity& security)
      : address_(std::move(address)),
        timeout_(timeout),
        stub_(v1::ShardService::NewStub(MakeChannel(address_, security))) {}

  void BecomeLeader(uint64_t token) override { token_.store(token); }

  absl::StatusOr<ShardDescription> Describe() override {
    v1::DescribeShardResponse response;
    PRECONDOR_RETURN_IF_ERROR(Call(&v1::ShardService::Stub::DescribeShard, v1::DescribeShardRequest(), response));
    return DecodeDescription(response);
  }

  // Fails at once if no server listens.
  absl::StatusOr<ShardDescription> Probe() override {
    v1::DescribeShardResponse response;
    PRECONDOR_RETURN_IF_ERROR(Call(&v1::ShardService::Stub::DescribeShard, v1::DescribeShardRequest(), response,
                                   std::min(timeout_, kProbeTimeout), /*wait_for_ready=*/false));
    return DecodeDescription(response);
  }

  absl::StatusOr<int64_t> Install(const SessionInstall& install) override {
    PRECONDOR_ASSIGN_OR_RETURN(const v1::InstallSessionRequest request, EncodeInstall(install));
    v1::InstallSessionResponse response;
    PRECONDOR_RETURN_IF_ERROR(Call(&v1::ShardService::Stub::InstallSession, request, response));
    return static_cast<int64_t>(response.reserved_bytes());
  }

  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override {
    v1::FenceSessionResponse response;
    PRECONDOR_RETURN_IF_ERROR(Call(&v1::ShardService::Stub::FenceSession, EncodeFence(fence), response));
    if (!response.must_roll_back()) return std::nullopt;
    return response.step();
  }

  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override {
    v1::TakeSnapshotResponse response;
    PRECONDOR_RETURN_IF_ERROR(Call(&v1::ShardService::Stub::TakeSnapshot, EncodeOrder(order), response,
                                   std::min(timeout_, kProbeTimeout), /*wait_for_ready=*/false));
    return SnapshotProgress{
        .begun = response.begun(), .durable = response.durable(), .snapshot_id = response.snapshot_id()};
  }

  absl::StatusOr<bool> Remove(uint64_t session_id) override {
    v1::RemoveSessionRequest request;
    request.set_session_id(session_id);
    v1::RemoveSessionResponse response;
    PRECONDOR_RETURN_IF_ERROR(Call(&v1::ShardService::Stub::RemoveSession, request, response));
    return response.existed();
  }

  absl::StatusOr<bool> Quarantine(uint64_t session_id) override {
    v1::QuarantineSessionRequest request;
    request.set_session_id(session_id);
    v1::QuarantineSessionResponse response;
    PRECONDOR_RETURN_IF_ERROR(Call(&v1::ShardService::Stub::QuarantineSession, request, response));
    return response.existed();
  }

  void CancelCalls() override {
    MutexLock lock(mu_);
    cancelled_ = true;
    for (grpc::ClientContext* call : calls_) call->TryCancel();
  }

 private:
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::ShardService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    Request request, Response& response) {
    return Call(method, std::move(request), response, timeout_, /*wait_for_ready=*/true);
  }
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::ShardService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    Request request, Response& response, absl::Duration timeout, bool wait_for_ready) {
    request.set_fencing_token(token_.load());
    grpc::ClientContext context;
    context.set_deadline(wire::GrpcDeadline(timeout));
    context.set_wait_for_ready(wait_for_ready);
    // Keeps the span of the current operation if it makes a call that is not a DescribeShard: timers that only probe
    // get no span.
    if (!std::is_same_v<Request, v1::DescribeShardRequest>) trace::Operation::Keep();
    if (const TraceContext* const trace = trace::Operation::CurrentTrace(); trace != nullptr) {
      context.AddMetadata(kTraceparentKey, FormatTraceparent(*trace));
    }
    {
      MutexLock lock(mu_);
      if (cancelled_) return absl::CancelledError(absl::StrCat("shard ", address_, ": the server is stopping"));
      calls_.insert(&context);
    }
    const auto ended = absl::MakeCleanup([this, &context] {
      MutexLock lock(mu_);
      calls_.erase(&context);
    });
    absl::Status status = wire::FromGrpcStatus((stub_.get()->*method)(&context, request, &response));
    if (status.ok()) return status;
    // To the coordinator's client, a shard is unavailable if it exceeds the deadline or if it cancels the call because
    // it is shutting down.
    const bool gone = absl::IsDeadlineExceeded(status) || (absl::IsCancelled(status) && !cancelled());
    const absl::StatusCode code = gone ? absl::StatusCode::kUnavailable : status.code();
    return ReasonedStatus(code, GetErrorReason(status), absl::StrCat("shard ", address_, ": ", status.message()));
  }

  bool cancelled() {
    MutexLock lock(mu_);
    return cancelled_;
  }

  const std::string address_;
  const absl::Duration timeout_;
  const std::unique_ptr<v1::ShardService::Stub> stub_;
  std::atomic<uint64_t> token_ = 0;

  Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_set<grpc::ClientContext*> calls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::unique_ptr<ShardControl> MakeShardClient(std::string address, absl::Duration timeout,
                                              const wire::ChannelSecurity& security) {
  return std::make_unique<ShardClient>(std::move(address), timeout, security);
}

}  // namespace precondor::rpc

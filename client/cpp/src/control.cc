// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/control.h"

#include <algorithm>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/status.h>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

#include "client/cpp/src/channel.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace_context.h"
#include "kernels/base/unix_address.h"
#include "proto/wire/channel.h"
#include "proto/wire/method_path.h"
#include "proto/wire/status_codec.h"

namespace precondor {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(20);
constexpr absl::Duration kLastPause = absl::Seconds(1);
constexpr absl::Duration kLastJoinPause = absl::Milliseconds(200);
constexpr absl::Duration kPoll = absl::Milliseconds(20);
// A rank that does not leave costs the others nothing, and its process wants to end.
constexpr absl::Duration kLongestLeave = absl::Seconds(5);

absl::Status WithContext(const absl::Status& status, absl::string_view context) {
  absl::Status out(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

// Sleeps like Canceller::Pause, or until the channel connects. gRPC reads what a new connection brings only while a
// call or this wait polls the channel, and calls on a channel that has failed end at once.
bool PauseOrConnect(grpc::Channel& channel, absl::Duration duration, Canceller& canceller) {
  if (channel.GetState(false) == GRPC_CHANNEL_READY) return canceller.Pause(duration);
  const absl::Time end = MonotonicNow() + duration;
  while (!canceller.cancelled()) {
    const absl::Duration left = end - MonotonicNow();
    const grpc_connectivity_state state = channel.GetState(false);
    if (state == GRPC_CHANNEL_READY || left <= absl::ZeroDuration()) return true;
    channel.WaitForStateChange(state, wire::GrpcDeadline(std::min(left, kPoll)));
  }
  return false;
}

}  // namespace

void Canceller::Cancel() {
  MutexLock lock(mu_);
  cancelled_ = true;
  for (grpc::ClientContext* context : running_) context->TryCancel();
  changed_.notify_all();
}

bool Canceller::Pause(absl::Duration duration) {
  MutexLock lock(mu_);
  changed_.wait_for(mu_, absl::ToChronoNanoseconds(duration),
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return cancelled_; });
  return !cancelled_;
}

bool Canceller::cancelled() const {
  MutexLock lock(mu_);
  return cancelled_;
}

bool Canceller::Run(grpc::ClientContext& context, const std::function<void()>& call) {
  {
    MutexLock lock(mu_);
    if (cancelled_) return false;
    running_.insert(&context);
  }
  call();
  MutexLock lock(mu_);
  running_.erase(&context);
  return true;
}

ControlClient::ControlClient(std::string address, absl::Duration rpc_timeout,
                             std::shared_ptr<const wire::ChannelSecurity> security, const std::string& traceparent)
    : address_(std::move(address)),
      rpc_timeout_(rpc_timeout),
      security_(std::move(security)),
      traceparent_(FormatTraceparent(ParseTraceparent(traceparent).value_or(NewTrace()))),
      channel_(MakeChannel(address_, *security_)) {}

absl::Status ControlClient::Invoke(const google::protobuf::Message& request, google::protobuf::Message& response,
                                   absl::Duration timeout, const std::string& traceparent, Canceller& canceller) {
  const std::string path = wire::MethodPath(*request.GetDescriptor());
  const grpc::internal::RpcMethod method(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC, channel_);
  const absl::Time deadline = MonotonicNow() + timeout;
  const std::string what = absl::StrCat("server ", address_, ": ", path.substr(path.rfind('/') + 1));
  if (const absl::Status usable = CheckServerAddress(address_); !usable.ok()) return WithContext(usable, what);
  if (!security_->status().ok()) return WithContext(security_->status(), what);
  absl::Duration pause = kFirstPause;
  absl::Status last;
  while (true) {
    grpc::ClientContext context;
    context.set_deadline(wire::GrpcDeadline(deadline - MonotonicNow()));
    // An attempt that waited for a connection would not say why it failed, and with TLS there are many possible
    // reasons.
    context.set_wait_for_ready(false);
    context.AddMetadata(kTraceparentKey, traceparent);
    absl::Status status;
    const bool ran = canceller.Run(context, [&] {
      status = wire::FromGrpcStatus(
          grpc::internal::BlockingUnaryCall<google::protobuf::MessageLite, google::protobuf::MessageLite>(
              channel_.get(), method, &context, request, &response));
    });
    if (!ran) {
      return absl::CancelledError(absl::StrCat(what, ": cancelled"));
    }
    if (status.ok()) return status;
    // A server that ends cancels its calls, which means unavailable, unless this client cancelled the call.
    if (absl::IsCancelled(status) && !canceller.cancelled()) status = absl::UnavailableError(status.message());
    // At the deadline the previous failure is more informative.
    if (status.code() == absl::StatusCode::kDeadlineExceeded && !last.ok()) return WithContext(last, what);
    const bool answered = GetErrorReason(status) != ErrorReason::kUnspecified;
    if (status.code() != absl::StatusCode::kUnavailable || answered) return WithContext(status, what);
    last = status;
    if (MonotonicNow() + pause >= deadline) return WithContext(last, what);
    if (!PauseOrConnect(*channel_, pause, canceller)) {
      return absl::CancelledError(absl::StrCat(what, ": cancelled"));
    }
    pause = std::min(pause * 2, kLastPause);
  }
}

absl::StatusOr<v1::GetServerInfoResponse> ControlClient::WaitForServer(absl::Duration timeout, Canceller& canceller) {
  v1::GetServerInfoResponse response;
  const absl::Status status = Invoke(v1::GetServerInfoRequest(), response, timeout, traceparent_, canceller);
  if (status.ok()) return response;
  const bool answered = GetErrorReason(status) != ErrorReason::kUnspecified;
  if (answered || !(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status))) return status;
  const std::string server = absl::StrCat("server ", address_, ": ");
  return absl::UnavailableError(absl::StrCat(server, "no answer within ", absl::FormatDuration(timeout), ": ",
                                             absl::StripPrefix(status.message(), server),
                                             TlsHint(status.message(), security_->has_tls())));
}

absl::Status ControlClient::LeaveSession(const v1::LeaveSessionRequest& request, Canceller& canceller) {
  v1::LeaveSessionResponse response;
  return Invoke(request, response, std::min(rpc_timeout_, kLongestLeave), traceparent_, canceller);
}

absl::StatusOr<v1::ReportStepResponse> ControlClient::ReportStep(const v1::ReportStepRequest& request,
                                                                 Canceller& canceller) {
  v1::ReportStepResponse response;
  const std::string traceparent = FormatTraceparent(TraceOfStep(request.session_id(), request.step()));
  PRECONDOR_RETURN_IF_ERROR(Invoke(request, response, rpc_timeout_, traceparent, canceller));
  return response;
}

std::string RanksText(absl::string_view begin, absl::Span<const uint32_t> ranks) {
  if (ranks.empty()) return "";
  return absl::StrCat(begin, ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

absl::StatusOr<v1::JoinSessionResponse> JoinUntilActive(ControlClient& control, const v1::JoinSessionRequest& request,
                                                        absl::Duration timeout, Canceller& canceller) {
  const absl::Time deadline = MonotonicNow() + timeout;
  absl::Duration pause = absl::Milliseconds(10);
  while (true) {
    absl::StatusOr<v1::JoinSessionResponse> joined = control.Call<v1::JoinSessionResponse>(request, canceller);
    const bool being_restored = GetErrorReason(joined.status()) == ErrorReason::kNotActive;
    if (joined.ok() ? joined->active() : !being_restored) return joined;
    if (MonotonicNow() + pause >= deadline) {
      if (being_restored) return joined;
      return absl::DeadlineExceededError(absl::StrCat(
          "session ", request.name(), ": rank ", request.rank(), " has joined, but not every other rank within ",
          absl::FormatDuration(timeout), RanksText("; not joined: ", joined->missing_ranks())));
    }
    if (!canceller.Pause(pause)) return absl::CancelledError(absl::StrCat("session ", request.name(), ": cancelled"));
    pause = std::min(pause * 2, kLastJoinPause);
  }
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/control.h"

#include <algorithm>
#include <cstddef>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/status.h>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"

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

// Returns what must be equal: the major version and, before 1.0, the minor version (else 0).
std::optional<std::pair<int, int>> Series(absl::string_view version) {
  const std::vector<absl::string_view> parts = absl::StrSplit(version, '.');
  int major = 0, minor = 0, patch = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &major) || !absl::SimpleAtoi(parts[1], &minor) ||
      !absl::SimpleAtoi(parts[2], &patch)) {
    return std::nullopt;
  }
  return std::pair(major, major == 0 ? minor : 0);
}

constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr absl::Duration kPause = absl::Milliseconds(100);
// A shard assembles the layers of a few sessions at a time.
constexpr absl::Duration kMostWait = absl::Minutes(2);

absl::StatusOr<bool> SendOnce(ControlClient& shard, v1::RestoreLayerRequest& piece, absl::string_view bytes,
                              Canceller& canceller) {
  size_t offset = 0;
  bool restored = false;
  do {
    const absl::string_view data = bytes.substr(offset, kPieceBytes);
    piece.set_offset(offset);
    piece.set_data(std::string(data));
    PRECONDOR_ASSIGN_OR_RETURN(const auto taken, shard.Call<v1::RestoreLayerResponse>(piece, canceller));
    restored = taken.restored();
    offset += data.size();
  } while (offset < bytes.size());
  return restored;
}

constexpr absl::Duration kPatience = absl::Seconds(3);
constexpr absl::Duration kSilence = absl::Seconds(5);

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
    if (absl::IsUnimplemented(status) && status.message().empty()) {
      status = absl::UnimplementedError("the server has no such call: expected a coordinator, or a newer release");
    }
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

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const wire::ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Gives each channel its own connection, so that closing the channel closes the connection. That releases borrowed
  // memory when a peer does not respond.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);  // the default of 30 s is longer than a restart
  arguments.SetInt(GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, wire::kWriteBufferBytes);
  wire::SetKeepalive(arguments);
  return wire::MakeDirectChannel(DialTarget(address), security.CredentialsFor(address), arguments);
}

absl::string_view TlsHint(absl::string_view reason, bool tls) {
  if (absl::StrContains(reason, "wrong version number")) return "; the server may expect plaintext";
  if (!absl::StrContains(reason, "Socket closed")) return "";
  return tls ? "; the server may refuse this client's certificate, or require one" : "; the server may expect TLS";
}

absl::Status CheckVersions(absl::string_view client, absl::string_view address, absl::string_view server) {
  const std::optional<std::pair<int, int>> wanted = Series(client), got = Series(server);
  if (wanted.has_value() && wanted == got) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("server ", address, ": version mismatch: this client is Precondor ", client, ", the server is ",
                   server.empty() ? "one that does not say its version" : absl::StrCat("Precondor ", server),
                   ": install the same release on both sides (what goes together: the same major version, and before "
                   "1.0 the same minor version)"));
}

absl::Status SendLayer(ControlClient& shard, v1::RestoreLayerRequest piece, absl::string_view bytes,
                       Canceller& canceller) {
  piece.set_total_bytes(bytes.size());
  const absl::Time deadline = MonotonicNow() + kMostWait;
  while (true) {
    const absl::StatusOr<bool> restored = SendOnce(shard, piece, bytes, canceller);
    if (restored.ok()) {
      if (*restored) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat("layer ", piece.layer(), ": was sent completely, but the shard expects more"));
    }
    // Other sessions are restored there, or an answer was lost and a piece was sent twice.
    const ErrorReason reason = GetErrorReason(restored.status());
    const bool again =
        reason == ErrorReason::kCapacity || reason == ErrorReason::kNotActive || absl::IsOutOfRange(restored.status());
    if (!again || MonotonicNow() + kPause >= deadline || !canceller.Pause(kPause)) return restored.status();
  }
}

MissingRanks::MissingRanks(v1::FrameHeader sender, std::vector<std::string> layers,
                           std::shared_ptr<const wire::ChannelSecurity> security)
    : sender_(std::move(sender)), epoch_(sender_.epoch()), layers_(std::move(layers)), security_(std::move(security)) {}

std::string MissingRanks::Describe(const std::string& shard, uint64_t step, uint32_t layer) const {
  {
    MutexLock lock(mu_);
    if (MonotonicNow() < silent_until_) return "";
  }
  v1::ListMissingRanksRequest request;
  *request.mutable_key() = sender_;
  request.mutable_key()->set_epoch(epoch_);
  request.mutable_key()->set_step(step);
  request.mutable_key()->set_layer(layer);
  Canceller canceller;
  const auto missing =
      ControlClient(shard, kPatience, security_, "").Call<v1::ListMissingRanksResponse>(request, canceller);
  if (missing.ok()) {
    const bool own = absl::c_linear_search(missing->ranks(), sender_.rank());  // whose gradient is there
    return RanksText(absl::StrCat("; layer ", layers_[layer], " waits for ", own ? "the statistics of " : ""),
                     missing->ranks());
  }
  MutexLock lock(mu_);
  silent_until_ = MonotonicNow() + kSilence;
  return "";
}

}  // namespace precondor

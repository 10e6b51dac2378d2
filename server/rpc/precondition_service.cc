// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/precondition_service.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/exchange_stream.h"

namespace precondor::rpc {
namespace {

// One Precondition call. Core's callbacks share ownership. The call finishes once: with core's answer, or when the
// client cancels the call or disconnects, because a call that waits for other ranks would otherwise delay shutdown.
// Later results are dropped. Thread-safe.
class UnaryCall : public std::enable_shared_from_this<UnaryCall> {
 public:
  // `caller` is the trace context in the client's traceparent, if any. Lifetime: `reactor`, `request` and `response`
  // exist until Finish.
  UnaryCall(grpc::ServerUnaryReactor* reactor, const v1::PreconditionRequest& request,
            v1::PreconditionResponse& response, ShardDataPlane& shard, OpenPayloads& open_payloads,
            ControlRunner& runner, TransferObserver& observer, std::optional<TraceContext> caller)
      : reactor_(reactor),
        request_(request),
        response_(response),
        shard_(shard),
        open_payloads_(open_payloads),
        runner_(runner),
        observer_(observer),
        caller_(std::move(caller)),
        start_(runner.clock().Now()) {}

  void Start() {
    observer_.OnReceived(TransferPath::kUnary, TransferKind::kGradient,
                         static_cast<int64_t>(request_.payload().size()));
    observer_.OnReceived(TransferPath::kUnary, TransferKind::kStatistics,
                         static_cast<int64_t>(request_.statistics_payload().size()));
    absl::StatusOr<AdmittedContribution> gradient =
        Admit(request_.gradient(), ContributionKind::kGradient, request_.payload());
    if (!gradient.ok()) return Finish(gradient.status());
    gradient_ = *std::move(gradient);
    absl::StatusOr<OpenPayloads::Hold> hold = open_payloads_.Begin(gradient_->header().key, request_.payload().size());
    if (!hold.ok()) {
      shard_.CountRefusal(gradient_->header(), hold.status());
      return Finish(hold.status());
    }
    hold_ = *std::move(hold);
    if (!request_.has_statistics()) return SubmitGradient();
    absl::StatusOr<AdmittedContribution> statistics =
        Admit(request_.statistics(), ContributionKind::kStatistics, request_.statistics_payload());
    if (!statistics.ok()) return Finish(statistics.status());
    shard_.Submit(
        *std::move(statistics), ToPayload(request_.statistics_payload()),
        [self = shared_from_this()](const absl::StatusOr<bool>& duplicate) {
          if (!duplicate.ok()) return self->Finish(duplicate.status());
          self->SubmitGradient();
        },
        /*result=*/nullptr);
  }

  void Finish(const absl::Status& status) {
    {
      MutexLock lock(mu_);
      if (finished_) return;
      finished_ = true;
    }
    End(status);
  }

 private:
  // Uses uint8_t on both sides: between char and uint8_t the library would copy byte by byte.
  static Payload ToPayload(const std::string& bytes) {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    return Payload(data, data + bytes.size());
  }

  absl::StatusOr<AdmittedContribution> Admit(const v1::FrameHeader& header, ContributionKind kind,
                                             const std::string& payload) {
    PRECONDOR_ASSIGN_OR_RETURN(ContributionHeader decoded, DecodeHeader(header));
    if (decoded.kind != kind) {
      return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                            kind == ContributionKind::kGradient ? "gradient: expected a header of kind GRADIENT"
                                                                : "statistics: expected a header of kind STATISTICS");
    }
    if (header.has_ring_offset()) {
      return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                            "header.ring_offset: expected the payload in the request; rings are for streams");
    }
    return shard_.AdmitContribution(std::move(decoded), payload.size(), SessionCaller::Showing(header.secret()));
  }

  void SubmitGradient() {
    Payload payload;
    {
      MutexLock lock(mu_);
      if (finished_) return;
      payload = ToPayload(request_.payload());
    }
    shard_.Submit(
        *std::move(gradient_), std::move(payload),
        [self = shared_from_this()](const absl::StatusOr<bool>& duplicate) {
          self->observer_.OnReceive(self->runner_.clock().Now() - self->start_);
          if (!duplicate.ok()) self->Finish(duplicate.status());
        },
        [self = shared_from_this()](const absl::StatusOr<GradientResult>& result) { self->Answer(result); });
  }

  void Answer(const absl::StatusOr<GradientResult>& answer) {
    // The answer is in device memory if this gradient was sent in a ring before.
    const absl::StatusOr<GradientResult> result = answer.ok() ? OnHost(*answer) : answer;
    if (!result.ok()) return Finish(result.status());
    {
      MutexLock lock(mu_);
      if (finished_) return;
      finished_ = true;
    }
    *response_.mutable_header() = AnswerHeader(request_.gradient(), v1::FRAME_KIND_RESULT);
    EncodeResult(*result, *response_.mutable_header(), *response_.mutable_outcome());
    observer_.OnSent(TransferPath::kUnary, TransferKind::kAnswer, result->payload_bytes());
    if (result->bytes != nullptr) response_.set_payload(result->bytes->data(), result->bytes->size());
    End(absl::OkStatus());
  }

  void End(const absl::Status& status) {
    constexpr char kMethod[] = "PreconditionService/Precondition";
    const absl::Time now = runner_.clock().Now();
    // One layer of one step is too little work for a span of its own, unless the caller keeps a span.
    if (caller_.has_value() && caller_->sampled) {
      trace::Span span{.context = {caller_->trace_id, NewSpanId(), true},
                       .parent_span_id = caller_->span_id,
                       .name = SpanName(kMethod),
                       .kind = trace::SpanKind::kServer,
                       .start = start_,
                       .end = now,
                       .status = status};
      span.attributes = {{"precondor.session_id", absl::StrCat(request_.gradient().session_id())},
                         {"precondor.step", static_cast<int64_t>(request_.gradient().step())},
                         {"precondor.layer", int64_t{request_.gradient().layer()}},
                         {"precondor.rank", int64_t{request_.gradient().rank()}}};
      runner_.tracer()->Record(std::move(span));
    }
    runner_.recorder()(kMethod, status.code(), now - start_);
    hold_.reset();  // core can keep this object for longer than the service exists
    reactor_->Finish(wire::ToGrpcStatus(status));
  }

  grpc::ServerUnaryReactor* const reactor_;
  const v1::PreconditionRequest& request_;
  v1::PreconditionResponse& response_;
  ShardDataPlane& shard_;
  OpenPayloads& open_payloads_;
  ControlRunner& runner_;
  TransferObserver& observer_;
  const std::optional<TraceContext> caller_;
  const absl::Time start_;
  OpenPayloads::Hold hold_;                       // set from admission on
  std::optional<AdmittedContribution> gradient_;  // set from admission until submission
  Mutex mu_;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

// The gRPC reactor of a UnaryCall. Lifetime: owns itself and deletes itself in OnDone.
class UnaryReactor final : public grpc::ServerUnaryReactor {
 public:
  UnaryReactor(const v1::PreconditionRequest& request, v1::PreconditionResponse& response, ShardDataPlane& shard,
               OpenPayloads& open_payloads, ControlRunner& runner, TransferObserver& observer,
               std::optional<TraceContext> caller)
      : call_(std::make_shared<UnaryCall>(this, request, response, shard, open_payloads, runner, observer,
                                          std::move(caller))) {
    call_->Start();
  }
  void OnCancel() override { call_->Finish(absl::CancelledError("the client cancelled the call, or is gone")); }
  void OnDone() override { delete this; }

 private:
  const std::shared_ptr<UnaryCall> call_;
};

}  // namespace

absl::StatusOr<std::function<void()>> PreconditionService::RefuseGrowth(uint64_t encoded, uint64_t decoded) {
  constexpr uint64_t kHeadersBytes = 64 << 10;
  if (decoded <= encoded + kHeadersBytes) return nullptr;
  return absl::ResourceExhaustedError(absl::StrCat("PreconditionService/Precondition: expected headers of at most ",
                                                   kHeadersBytes, " bytes when they are decoded, got a request of ",
                                                   encoded, " bytes that takes ", decoded));
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PreconditionService::Exchange(
    grpc::CallbackServerContext* context) {
  SharedRegions* const regions =
      regions_ != nullptr && SharedRegions::IsOnThisHost(context->peer()) ? regions_ : nullptr;
  SharedMemoryLimit* const shared_memory = shared_memory_.MayOffer(context->peer()) ? &shared_memory_ : nullptr;
  return new ExchangeStream(shard_, backend_, credit_bytes_, open_payloads_, shard_generation_, regions, shared_memory,
                            runner_, observer_, runner_.tracer() == nullptr ? std::nullopt : CallerTrace(*context));
}

grpc::ServerUnaryReactor* PreconditionService::Precondition(grpc::CallbackServerContext* context,
                                                            const v1::PreconditionRequest* request,
                                                            v1::PreconditionResponse* response) {
  return new UnaryReactor(*request, *response, shard_, open_payloads_, runner_, observer_,
                          runner_.tracer() == nullptr ? std::nullopt : CallerTrace(*context));
}

grpc::ServerUnaryReactor* PreconditionService::ListMissingRanks(grpc::CallbackServerContext* context,
                                                                const v1::ListMissingRanksRequest* request,
                                                                v1::ListMissingRanksResponse* response) {
  return runner_.Run(context, "PreconditionService/ListMissingRanks", [this, request, response]() -> absl::Status {
    const v1::FrameHeader& key = request->key();
    PRECONDOR_ASSIGN_OR_RETURN(const std::set<uint32_t> ranks,
                               shard_.MissingRanks(DecodeKey(key), SessionCaller::Showing(key.secret())));
    *response->mutable_ranks() = FirstRanks(ranks);
    return absl::OkStatus();
  });
}

}  // namespace precondor::rpc

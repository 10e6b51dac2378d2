// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/precondition_service.h"

#include <memory>
#include <string>
#include <utility>

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/exchange_stream.h"

namespace precondor::rpc {
namespace {

// Answers the call once, whenever core is done; a call whose peer has gone is answered all the same, to nobody.
class UnaryCall {
 public:
  UnaryCall(grpc::ServerUnaryReactor* reactor, const v1::PreconditionRequest& request,
            v1::PreconditionResponse& response, ControlRunner& runner)
      : reactor_(reactor), request_(request), response_(response), runner_(runner), start_(runner.clock().Now()) {}

  const v1::PreconditionRequest& request() const { return request_; }

  void Finish(const absl::Status& status) {
    runner_.recorder()("PreconditionService/Precondition", status.code(), runner_.clock().Now() - start_);
    reactor_->Finish(wire::ToGrpcStatus(status));
  }

  void Answer(const absl::StatusOr<GradientResult>& result) {
    if (!result.ok()) return Finish(result.status());
    *response_.mutable_header() = AnswerHeader(request_.gradient(), v1::FRAME_KIND_RESULT);
    EncodeResult(*result, *response_.mutable_header(), *response_.mutable_outcome());
    if (result->bytes != nullptr) response_.set_payload(result->bytes->data(), result->bytes->size());
    Finish(absl::OkStatus());
  }

 private:
  grpc::ServerUnaryReactor* const reactor_;
  const v1::PreconditionRequest& request_;
  v1::PreconditionResponse& response_;
  ControlRunner& runner_;
  const absl::Time start_;
};

absl::StatusOr<ContributionHeader> CheckedHeader(const Shard& shard, const v1::FrameHeader& header,
                                                 ContributionKind kind, const std::string& payload) {
  PRECONDOR_ASSIGN_OR_RETURN(ContributionHeader decoded, DecodeHeader(header));
  if (decoded.kind != kind) {
    return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                          kind == ContributionKind::kGradient ? "gradient: expected a header of kind GRADIENT"
                                                              : "statistics: expected a header of kind STATISTICS");
  }
  PRECONDOR_RETURN_IF_ERROR(shard.CheckHeader(decoded, payload.size()));
  return decoded;
}

// The same type on both sides of each copy: between char and uint8_t the library would go byte by byte.
Payload ToPayload(const std::string& bytes) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  return Payload(data, data + bytes.size());
}

void SubmitGradient(Shard& shard, const ContributionHeader& header, const std::shared_ptr<UnaryCall>& call) {
  shard.SubmitGradient(
      header, ToPayload(call->request().payload()),
      [call](const absl::StatusOr<bool>& duplicate) {
        if (!duplicate.ok()) call->Finish(duplicate.status());
      },
      [call](const absl::StatusOr<GradientResult>& result) { call->Answer(result); });
}

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PreconditionService::Exchange(
    grpc::CallbackServerContext*) {
  return new ExchangeStream(shard_, credit_bytes_, runner_.clock(), runner_.recorder());
}

grpc::ServerUnaryReactor* PreconditionService::Precondition(grpc::CallbackServerContext* context,
                                                            const v1::PreconditionRequest* request,
                                                            v1::PreconditionResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  auto call = std::make_shared<UnaryCall>(reactor, *request, *response, runner_);
  const absl::StatusOr<ContributionHeader> gradient =
      CheckedHeader(shard_, request->gradient(), ContributionKind::kGradient, request->payload());
  if (!gradient.ok()) {
    call->Finish(gradient.status());
  } else if (!request->has_statistics()) {
    SubmitGradient(shard_, *gradient, call);
  } else {
    const absl::StatusOr<ContributionHeader> statistics =
        CheckedHeader(shard_, request->statistics(), ContributionKind::kStatistics, request->statistics_payload());
    if (!statistics.ok()) {
      call->Finish(statistics.status());
      return reactor;
    }
    shard_.SubmitStatistics(*statistics, ToPayload(request->statistics_payload()),
                            [this, call, header = *gradient](const absl::StatusOr<bool>& duplicate) {
                              if (!duplicate.ok()) return call->Finish(duplicate.status());
                              SubmitGradient(shard_, header, call);
                            });
  }
  return reactor;
}

}  // namespace precondor::rpc

// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/precondition_service.h"

#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/service_type.h>
#include <optional>
#include <set>
#include <utility>

#include "kernels/base/status_macros.h"
#include "precondor/v1/precondition.pb.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {
namespace {

constexpr char kExchange[] = "/precondor.v1.PreconditionService/Exchange";

absl::Status ListMissingRanks(const v1::ListMissingRanksRequest& request, v1::ListMissingRanksResponse& response,
                              ShardDataPlane& shard) {
  const v1::FrameHeader& key = request.key();
  PRECONDOR_ASSIGN_OR_RETURN(const std::set<uint32_t> ranks,
                             shard.MissingRanks(DecodeKey(key), SessionCaller::Showing(key.secret())));
  *response.mutable_ranks() = FirstRanks(ranks);
  return absl::OkStatus();
}

}  // namespace

PreconditionService::PreconditionService(ShardDataPlane& shard, std::string backend, uint64_t credit_bytes,
                                         uint64_t shard_generation, ControlRunner& runner, TransferObserver& observer,
                                         SharedRegions* regions, int64_t shared_memory_bytes)
    : ControlService(runner),
      shard_(shard),
      backend_(std::move(backend)),
      credit_bytes_(credit_bytes),
      open_payloads_(credit_bytes),
      shard_generation_(shard_generation),
      observer_(observer),
      regions_(regions),
      shared_memory_(shared_memory_bytes) {
  Serve(ListMissingRanks, shard_);
  AddMethod(new grpc::internal::RpcServiceMethod(kExchange, grpc::internal::RpcMethod::BIDI_STREAMING, nullptr));
  MarkMethodRawCallback(/*index=*/1, new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>(
                                         [this](grpc::CallbackServerContext* context) { return Exchange(context); }));
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PreconditionService::Exchange(
    grpc::CallbackServerContext* context) {
  SharedRegions* const regions =
      regions_ != nullptr && SharedRegions::IsOnThisHost(context->peer()) ? regions_ : nullptr;
  SharedMemoryLimit* const shared_memory = shared_memory_.MayOffer(context->peer()) ? &shared_memory_ : nullptr;
  return new ExchangeStream(shard_, backend_, credit_bytes_, open_payloads_, shard_generation_, regions, shared_memory,
                            runner_, observer_, runner_.tracer() == nullptr ? std::nullopt : CallerTrace(*context));
}

}  // namespace precondor::rpc

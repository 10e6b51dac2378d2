// SPDX-License-Identifier: Apache-2.0
// Decodes the requests of unary calls within a RequestBudget. gRPC by itself decodes whatever arrives.
#pragma once

#include <grpcpp/grpcpp.h>
#include <memory>
#include <utility>

#include "absl/status/status.h"

#include "proto/wire/decoded_size.h"
#include "proto/wire/status_codec.h"
#include "server/rpc/request_budget.h"

namespace precondor::rpc {

// A request that is decoded if the budget has room for it. It is counted until it is destroyed.
template <typename Message>
class BoundedRequest {
 public:
  BoundedRequest() = default;  // gRPC's templates name it; a BoundedAllocator makes all requests
  // Lifetime: `budget` outlives the request.
  explicit BoundedRequest(RequestBudget& budget) : budget_(&budget) {}
  ~BoundedRequest() {
    if (counted_ > 0) budget_->End(counted_);
  }
  BoundedRequest(const BoundedRequest&) = delete;
  BoundedRequest& operator=(const BoundedRequest&) = delete;

  // Takes the bytes. Returns the error of gRPC's decoder.
  grpc::Status Decode(grpc::ByteBuffer& encoded) {
    const uint64_t size = wire::DecodedSize(*Message::descriptor(), encoded);
    admitted_ = budget_->Begin(Message::descriptor()->name(), encoded.Length(), size);
    if (!admitted_.ok()) {
      encoded.Clear();
      return grpc::Status::OK;
    }
    counted_ = size;
    return grpc::SerializationTraits<Message>::Deserialize(&encoded, &message_);
  }

  // The budget's refusal; the message is then empty.
  const absl::Status& admitted() const { return admitted_; }
  const Message& message() const { return message_; }

 private:
  RequestBudget* const budget_ = nullptr;
  uint64_t counted_ = 0;
  absl::Status admitted_;
  Message message_;
};

template <typename Request, typename Response>
class BoundedCall final : public grpc::MessageHolder<BoundedRequest<Request>, Response> {
 public:
  explicit BoundedCall(RequestBudget& budget) : request_(budget) {
    this->set_request(&request_);
    this->set_response(&response_);
  }
  void Release() override { delete this; }

 private:
  BoundedRequest<Request> request_;
  Response response_;
};

template <typename Request, typename Response>
class BoundedAllocator final : public grpc::MessageAllocator<BoundedRequest<Request>, Response> {
 public:
  explicit BoundedAllocator(RequestBudget& budget) : budget_(budget) {}
  grpc::MessageHolder<BoundedRequest<Request>, Response>* AllocateMessages() override {
    return new BoundedCall<Request, Response>(budget_);
  }

 private:
  RequestBudget& budget_;
};

// Returns gRPC's handler of a unary method that decodes within the budget; a service gives it to MarkMethodCallback in
// place of the generated one. Lifetime: `budget` and `service` outlive it.
template <typename Service, typename Request, typename Response>
grpc::internal::MethodHandler* BoundedHandler(RequestBudget& budget, Service* service,
                                              grpc::ServerUnaryReactor* (Service::*method)(grpc::CallbackServerContext*,
                                                                                           const Request*, Response*)) {
  auto allocator = std::make_shared<BoundedAllocator<Request, Response>>(budget);
  auto* const handler = new grpc::internal::CallbackUnaryHandler<BoundedRequest<Request>, Response>(
      [allocator, service, method](grpc::CallbackServerContext* context, const BoundedRequest<Request>* request,
                                   Response* response) -> grpc::ServerUnaryReactor* {
        if (request->admitted().ok()) return (service->*method)(context, &request->message(), response);
        grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
        reactor->Finish(wire::ToGrpcStatus(request->admitted()));
        return reactor;
      });
  handler->SetMessageAllocator(allocator.get());
  return handler;
}

}  // namespace precondor::rpc

// gRPC calls this for each request.
template <typename Message>
class grpc::SerializationTraits<precondor::rpc::BoundedRequest<Message>, void> {
 public:
  static Status Deserialize(ByteBuffer* encoded, precondor::rpc::BoundedRequest<Message>* request) {
    return request->Decode(*encoded);
  }
};

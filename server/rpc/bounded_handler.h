// SPDX-License-Identifier: Apache-2.0
// Decodes the requests of control calls within a bound. gRPC by itself decodes whatever arrives.
#pragma once

#include <functional>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "proto/wire/decoded_size.h"
#include "server/rpc/request_budget.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// A request that is decoded if the budget has room for it.
template <typename Message>
class BoundedRequest {
 public:
  BoundedRequest() = default;  // gRPC's templates name it; a BoundedAllocator makes all requests
  // Lifetime: the budget and the characters of `method` outlive the request.
  BoundedRequest(RequestBudget& budget, absl::string_view method) : budget_(&budget), method_(method) {}
  ~BoundedRequest() {
    if (budget_ != nullptr) budget_->End(counted_);
  }
  BoundedRequest(const BoundedRequest&) = delete;
  BoundedRequest& operator=(const BoundedRequest&) = delete;

  // Takes the bytes. Returns the error of gRPC's decoder.
  grpc::Status Decode(grpc::ByteBuffer& encoded) {
    const uint64_t decoded = wire::DecodedSize(*Message::descriptor(), encoded);
    admitted_ = budget_->Begin(method_, encoded.Length(), decoded);
    if (!admitted_.ok()) {
      encoded.Clear();
      return grpc::Status::OK;
    }
    counted_ = decoded;
    return grpc::SerializationTraits<Message>::Deserialize(&encoded, &message_);
  }

  // The refusal; the message is then empty.
  const absl::Status& admitted() const { return admitted_; }
  const Message& message() const { return message_; }

 private:
  RequestBudget* const budget_ = nullptr;
  const absl::string_view method_;
  uint64_t counted_ = 0;
  absl::Status admitted_;
  Message message_;
};

template <typename Request, typename Response>
class BoundedCall final : public grpc::MessageHolder<BoundedRequest<Request>, Response> {
 public:
  BoundedCall(RequestBudget& budget, absl::string_view method) : request_(budget, method) {
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
  BoundedAllocator(RequestBudget& budget, absl::string_view method) : budget_(budget), method_(method) {}
  grpc::MessageHolder<BoundedRequest<Request>, Response>* AllocateMessages() override {
    return new BoundedCall<Request, Response>(budget_, method_);
  }

 private:
  RequestBudget& budget_;
  const absl::string_view method_;
};

// Begins a call and returns its reactor.
template <typename Request, typename Response>
using BeginCall =
    std::function<grpc::ServerUnaryReactor*(grpc::CallbackServerContext*, const Request* request, Response* response)>;

// Returns gRPC's handler of a method whose requests are admitted within the runner's budget. Lifetime: `runner` and the
// characters of `method`, "Service/Method", outlive it.
template <typename Request, typename Response>
grpc::internal::MethodHandler* BoundedHandler(ControlRunner& runner, absl::string_view method,
                                              BeginCall<Request, Response> begin) {
  auto allocator = std::make_shared<BoundedAllocator<Request, Response>>(runner.request_budget(), method);
  auto* const handler = new grpc::internal::CallbackUnaryHandler<BoundedRequest<Request>, Response>(
      [allocator, &runner, method, begin = std::move(begin)](grpc::CallbackServerContext* context,
                                                             const BoundedRequest<Request>* request,
                                                             Response* response) -> grpc::ServerUnaryReactor* {
        if (request->admitted().ok()) return begin(context, &request->message(), response);
        return runner.RunNow(context, method, [request] { return request->admitted(); });
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

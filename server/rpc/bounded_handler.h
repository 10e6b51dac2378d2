// SPDX-License-Identifier: Apache-2.0
// Decodes the requests of unary calls within a bound. gRPC by itself decodes whatever arrives.
#pragma once

#include <functional>
#include <google/protobuf/descriptor.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/decoded_size.h"
#include "proto/wire/status_codec.h"
#include "server/rpc/request_budget.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Says before a request is decoded whether it may be, by its bytes and by those that it will take. The returned
// function is called when the request is destroyed.
using AdmitRequest = std::function<absl::StatusOr<std::function<void()>>(uint64_t encoded, uint64_t decoded)>;

// A request that is decoded if it is admitted.
template <typename Message>
class BoundedRequest {
 public:
  BoundedRequest() = default;  // gRPC's templates name it; a BoundedAllocator makes all requests
  // Lifetime: `admit` outlives the request.
  explicit BoundedRequest(const AdmitRequest& admit) : admit_(&admit) {}
  ~BoundedRequest() {
    if (end_ != nullptr) end_();
  }
  BoundedRequest(const BoundedRequest&) = delete;
  BoundedRequest& operator=(const BoundedRequest&) = delete;

  // Takes the bytes. Returns the error of gRPC's decoder.
  grpc::Status Decode(grpc::ByteBuffer& encoded) {
    auto admitted = (*admit_)(encoded.Length(), wire::DecodedSize(*Message::descriptor(), encoded));
    admitted_ = admitted.status();
    if (!admitted.ok()) {
      encoded.Clear();
      return grpc::Status::OK;
    }
    end_ = *std::move(admitted);
    return grpc::SerializationTraits<Message>::Deserialize(&encoded, &message_);
  }

  // The refusal; the message is then empty.
  const absl::Status& admitted() const { return admitted_; }
  const Message& message() const { return message_; }

 private:
  const AdmitRequest* const admit_ = nullptr;
  std::function<void()> end_;
  absl::Status admitted_;
  Message message_;
};

template <typename Request, typename Response>
class BoundedCall final : public grpc::MessageHolder<BoundedRequest<Request>, Response> {
 public:
  explicit BoundedCall(const AdmitRequest& admit) : request_(admit) {
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
  explicit BoundedAllocator(AdmitRequest admit) : admit_(std::move(admit)) {}
  grpc::MessageHolder<BoundedRequest<Request>, Response>* AllocateMessages() override {
    return new BoundedCall<Request, Response>(admit_);
  }

 private:
  const AdmitRequest admit_;
};

// Begins a call and returns its reactor.
template <typename Request, typename Response>
using BeginCall =
    std::function<grpc::ServerUnaryReactor*(grpc::CallbackServerContext*, const Request* request, Response* response)>;

// Returns gRPC's handler of a unary method whose requests are admitted first. Lifetime: `runner` outlives it.
template <typename Request, typename Response>
grpc::internal::MethodHandler* BoundedHandler(ControlRunner& runner, absl::string_view name, AdmitRequest admit,
                                              BeginCall<Request, Response> begin) {
  auto allocator = std::make_shared<BoundedAllocator<Request, Response>>(std::move(admit));
  auto* const handler = new grpc::internal::CallbackUnaryHandler<BoundedRequest<Request>, Response>(
      [allocator, &runner, name = std::string(name), begin = std::move(begin)](
          grpc::CallbackServerContext* context, const BoundedRequest<Request>* request,
          Response* response) -> grpc::ServerUnaryReactor* {
        if (request->admitted().ok()) return begin(context, &request->message(), response);
        return runner.RunNow(context, name, [request] { return request->admitted(); });
      });
  handler->SetMessageAllocator(allocator.get());
  return handler;
}

// Returns the place of a method, "Service/Method", in its service's definition, by which MarkMethodCallback names it.
inline int MethodIndex(absl::string_view name) {
  const std::string full = absl::StrCat("precondor.v1.", absl::StrReplaceAll(name, {{"/", "."}}));
  const auto* const method = google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(full);
  PRECONDOR_CHECK(method != nullptr);
  return method->index();
}

// Returns what admits the requests of control calls within the runner's budget.
inline AdmitRequest WithinBudget(ControlRunner& runner, absl::string_view name) {
  return [&budget = runner.request_budget(), name = std::string(name)](
             uint64_t encoded, uint64_t decoded) -> absl::StatusOr<std::function<void()>> {
    PRECONDOR_RETURN_IF_ERROR(budget.Begin(name, encoded, decoded));
    return [&budget, decoded] { budget.End(decoded); };
  };
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

// SPDX-License-Identifier: Apache-2.0
// Calls of services whose .proto files are gRPC's own (health, reflection): messages are written and read as bytes.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <memory>
#include <optional>
#include <string>

#include "tests/loopback/raw_client.h"

namespace precondor {

// One request and the answers to it, one after the other. One thread.
class GenericCall {
 public:
  GenericCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const std::string& request)
      : stub_(channel) {
    call_ = stub_.PrepareCall(&context_, method, &queue_);
    call_->StartCall(this);
    Next();
    const grpc::Slice slice(request);
    call_->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), this);
    Next();
  }
  ~GenericCall() {
    context_.TryCancel();
    if (!ended_) End();
    queue_.Shutdown();
    while (Next()) {
    }
  }
  GenericCall(const GenericCall&) = delete;
  GenericCall& operator=(const GenericCall&) = delete;

  // Waits for the next message; nothing when the call has ended.
  std::optional<std::string> Read() {
    grpc::ByteBuffer buffer;
    call_->Read(&buffer, this);
    grpc::Slice bytes;
    if (!Next() || !buffer.DumpToSingleSlice(&bytes).ok()) return std::nullopt;
    return std::string(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
  }

  // How the call ends. The last call of this class.
  grpc::Status End() {
    ended_ = true;
    grpc::Status status;
    call_->Finish(&status, this);
    Next();
    return status;
  }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  TimedContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool ended_ = false;
};

// A HealthCheckRequest: field 1 is the service's name.
inline std::string HealthRequest(const std::string& service) {
  return service.empty() ? "" : std::string("\x0a") + static_cast<char>(service.size()) + service;
}

// A HealthCheckResponse: field 1 is 1 serving, 2 not, 3 no such service (Watch alone); -1 for no message.
inline int HealthStatus(const std::optional<std::string>& response) {
  return response.has_value() && response->size() == 2 && (*response)[0] == 0x08 ? (*response)[1] : -1;
}

inline int CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  return HealthStatus(GenericCall(channel, "/grpc.health.v1.Health/Check", HealthRequest(service)).Read());
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// One Exchange call to a shard, and the shared memory that takes its place.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/trace_context.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/shared_channel.h"

namespace precondor {

// Takes the events of a stream, on gRPC's threads or on that of the shared memory.
class ExchangeEvents {
 public:
  virtual ~ExchangeEvents() = default;
  // `bytes` is the size of the encoded message.
  virtual void OnRead(absl::StatusOr<wire::Received<v1::ExchangeResponse>> message, size_t bytes) = 0;
  virtual void OnWriteDone(bool ok) = 0;
  // Nothing more will be read.
  virtual void OnBroken() = 0;
  // The shard has broken the stream's shared memory.
  virtual void OnMemoryBroken(const absl::Status& status) = 0;
  // The last event.
  virtual void OnStreamDone(const grpc::Status& status) = 0;
};

// Forwards the events of one call. The caller starts every operation under one lock while a read is outstanding, so
// that gRPC cannot report the end in between. The caller deletes the stream later on one of its own threads: the
// context holds the channel, and gRPC 1.51 crashes if a channel's last reference is dropped on a gRPC callback thread.
class ExchangeStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ExchangeStream(ExchangeEvents* events, grpc::GenericStub& stub, const std::string& traceparent) : events_(events) {
    context_.AddMetadata(kTraceparentKey, traceparent);
    stub.PrepareBidiStreamingCall(&context_, "/precondor.v1.PreconditionService/Exchange", {}, this);
  }
  void Start() {
    StartRead(&in_);
    StartCall();
  }
  // From now on messages travel through `memory`, unless this process can start no thread.
  void UseSharedMemory(std::unique_ptr<wire::SharedMemory> memory) {
    auto started = wire::SharedChannel::Start(
        wire::SharedChannel::Side::kClient, std::move(memory),
        wire::SharedChannel::Events{.read =
                                        [this](absl::string_view message) {
                                          events_->OnRead(wire::DecodeContiguousResponse(message), message.size());
                                          return true;
                                        },
                                    .written = [this] { events_->OnWriteDone(/*ok=*/true); },
                                    .broken = [this](const absl::Status& status) { events_->OnMemoryBroken(status); }});
    if (started.ok()) shared_ = *std::move(started);
  }
  // Returns true if the message has left. Otherwise OnWriteDone follows.
  bool Write(const grpc::ByteBuffer& frame, bool more) {
    if (shared_ != nullptr) return shared_->Write(frame);
    out_ = frame;  // shares the buffers
    grpc::WriteOptions options;
    if (more) options.set_buffer_hint();
    StartWrite(&out_, options);
    return false;
  }
  void HalfClose() { StartWritesDone(); }
  void Cancel() { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) {
      events_->OnBroken();
      return;
    }
    if (shared_ != nullptr) {
      events_->OnRead(absl::InternalError("expected frames through shared memory alone, got one by gRPC"),
                      in_.Length());
      return;
    }
    events_->OnRead(wire::DecodeResponse(in_), in_.Length());
    in_.Clear();
    StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    out_.Clear();  // it would keep the payload's memory borrowed until the next write
    events_->OnWriteDone(ok);
  }
  void OnDone(const grpc::Status& status) override {
    shared_ = nullptr;  // no event of it comes after the stream's end
    events_->OnStreamDone(status);
  }

  ExchangeEvents* const events_;
  grpc::ClientContext context_;
  grpc::ByteBuffer in_;
  grpc::ByteBuffer out_;
  std::unique_ptr<wire::SharedChannel> shared_;  // null if messages travel by gRPC
};

}  // namespace precondor

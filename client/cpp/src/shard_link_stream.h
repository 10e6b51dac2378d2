// SPDX-License-Identifier: Apache-2.0
// One Exchange call of a ShardLink, and the shared memory that takes its place.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <memory>
#include <string>
#include <utility>

#include "client/cpp/src/shard_link.h"
#include "kernels/base/trace_context.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/shared_channel.h"

namespace precondor {

// Forwards the events of one call to its link. Every operation starts under the link's lock while a read is
// outstanding, so that gRPC cannot report the end in between; OnDone is the last event. The link deletes the stream
// later on one of its own threads: the context holds the channel, and gRPC 1.51 crashes if a channel's last reference
// is dropped on a gRPC callback thread.
class ShardLink::Stream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Stream(ShardLink* link, grpc::GenericStub& stub, const std::string& traceparent) : link_(link) {
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
                                          link_->OnRead(wire::DecodeContiguousResponse(message), message.size());
                                          return true;
                                        },
                                    .written = [this] { link_->OnWriteDone(/*ok=*/true); },
                                    .broken = [this](const absl::Status& status) { link_->OnMemoryBroken(status); }});
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
      link_->OnBroken();
      return;
    }
    if (shared_ != nullptr) {
      link_->OnRead(absl::InternalError("expected frames through shared memory alone, got one by gRPC"), in_.Length());
      return;
    }
    link_->OnRead(wire::DecodeResponse(in_), in_.Length());
    in_.Clear();
    StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    out_.Clear();  // it would keep the payload's memory borrowed until the next write
    link_->OnWriteDone(ok);
  }
  void OnDone(const grpc::Status& status) override {
    shared_ = nullptr;  // no event of it comes after the stream's end
    link_->OnStreamDone(status);
  }

  ShardLink* const link_;
  grpc::ClientContext context_;
  grpc::ByteBuffer in_;
  grpc::ByteBuffer out_;
  std::unique_ptr<wire::SharedChannel> shared_;  // null if messages travel by gRPC
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// One Exchange call of a ShardLink.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <string>

#include "client/cpp/src/shard_link.h"
#include "kernels/base/trace_context.h"

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
  void Write(const grpc::ByteBuffer& frame, bool more) {
    out_ = frame;  // shares the buffers
    grpc::WriteOptions options;
    if (more) options.set_buffer_hint();
    StartWrite(&out_, options);
  }
  void HalfClose() { StartWritesDone(); }
  void Cancel() { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) {
      link_->OnBroken();
      return;
    }
    link_->OnRead(in_);
    in_.Clear();
    StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    out_.Clear();  // it would keep the payload's memory borrowed until the next write
    link_->OnWriteDone(ok);
  }
  void OnDone(const grpc::Status& status) override { link_->OnStreamDone(status); }

  ShardLink* const link_;
  grpc::ClientContext context_;
  grpc::ByteBuffer in_;
  grpc::ByteBuffer out_;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// One Exchange stream: frames in, answers out.
#pragma once

#include <grpcpp/grpcpp.h>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "precondor/v1/precondition.pb.h"
#include "proto/wire/chunk_assembler.h"
#include "server/core/shard.h"
#include "server/rpc/frame_queue.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Owns itself: made for a call, deleted in OnDone. Reads on one gRPC thread at a time; answers come from any thread
// through the FrameQueue. A bad contribution is answered by an ERROR frame and the stream goes on; a frame that cannot
// be decoded ends the stream with InvalidArgument.
class ExchangeStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ExchangeStream(Shard& shard, uint64_t credit_bytes, uint64_t memory_id, const Clock& clock, RpcRecorder recorder);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  absl::Status Handle(const grpc::ByteBuffer& message);
  void HandleFrame(const v1::FrameHeader& header, const wire::ReceivedBytes& payload);
  void Fetch(const v1::FrameHeader& header);
  void Submit(wire::ChunkAssembler::Result contribution);
  void End(const absl::Status& status);

  Shard& shard_;
  const Clock& clock_;
  const RpcRecorder recorder_;
  const absl::Time start_;
  absl::StatusCode code_ = absl::StatusCode::kOk;  // written before Finish, read in OnDone
  wire::ChunkAssembler assembler_;
  grpc::ByteBuffer incoming_;
  const std::shared_ptr<FrameQueue> queue_;
};

}  // namespace precondor::rpc

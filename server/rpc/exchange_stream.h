// SPDX-License-Identifier: Apache-2.0
// One Exchange stream: frames in, answers out.
#pragma once

#include <atomic>
#include <grpcpp/grpcpp.h>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "precondor/v1/precondition.pb.h"
#include "proto/wire/chunk_assembler.h"
#include "server/core/shard/shard_data_plane.h"
#include "server/core/transfer_observer.h"
#include "server/rpc/frame_queue.h"
#include "server/rpc/open_payloads.h"
#include "server/rpc/payload_path.h"
#include "server/rpc/shared_regions.h"
#include "server/rpc/step_spans.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Owns itself: made for a call, deleted in OnDone. Reads on one gRPC thread at a time; answers come from any thread
// through the FrameQueue. A bad contribution is answered by an ERROR frame and the stream goes on; a frame that cannot
// be decoded ends the stream with InvalidArgument.
class ExchangeStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // `open_payloads`: of all streams. `shard_generation` as PreconditionService's. `regions` as PayloadPath's. `caller`:
  // what the client's traceparent says.
  ExchangeStream(ShardDataPlane& shard, uint64_t credit_bytes, OpenPayloads& open_payloads, uint64_t shard_generation,
                 SharedRegions* regions, const ControlRunner& runner, TransferObserver& observer,
                 const std::optional<TraceContext>& caller);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  absl::Status Handle(const grpc::ByteBuffer& message);
  // Whether the shard still knows of the frame's session what it knew when the stream began.
  absl::Status CheckGeneration(const v1::ExchangeRequest& frame) const;
  void HandleFrame(const v1::ExchangeRequest& message, const wire::ReceivedBytes& payload);
  // With the secret that this frame or an earlier one of its session has shown.
  const SessionCaller& CallerOf(const v1::FrameHeader& header);
  void Fetch(const v1::FrameHeader& header);
  void OpenRing(const v1::ExchangeRequest& request);
  // A frame whose payload lies in the ring.
  void SubmitInRing(const v1::FrameHeader& header, const wire::ReceivedBytes& payload, absl::Time began);
  struct SlotContribution {
    AdmittedContribution admitted;
    StreamRegion::Gradient gradient;
  };
  absl::StatusOr<SlotContribution> TakeFromRing(const v1::FrameHeader& header, const wire::ReceivedBytes& payload);
  void Submit(AdmittedContribution admitted, wire::ChunkAssembler::Result contribution, absl::Time began);
  std::shared_ptr<StepSpan> SpanOf(const v1::FrameHeader& header) {
    return spans_ == nullptr ? nullptr : spans_->Of(header);
  }
  void End(const absl::Status& status);
  void BeginTrace(trace::Tracer& tracer, const std::optional<TraceContext>& caller);

  ShardDataPlane& shard_;
  const uint64_t state_generation_;
  const Clock& clock_;
  TransferObserver& observer_;
  const RpcRecorder recorder_;
  const absl::Time start_;
  OpenPayloads& open_payloads_;
  std::atomic<bool> cancelled_ = false;
  absl::StatusCode code_ = absl::StatusCode::kOk;  // written before Finish, read in OnDone
  // A contribution that has not come whole: admitted with its first frame, which came at `began`.
  struct Incoming {
    AdmittedContribution admitted;
    absl::Time began;
    OpenPayloads::Hold hold;  // null: it came with its first frame
  };
  using IncomingKey = std::tuple<uint64_t, uint64_t, uint64_t, uint32_t, uint32_t, uint64_t, int>;
  static IncomingKey KeyOf(const v1::FrameHeader& header);
  // As many as path_ has: session, epoch, step, layer, rank, incarnation, kind.
  std::map<IncomingKey, Incoming> open_;
  static constexpr size_t kMaxCallers = 64;     // a stream of more sessions shows their secrets again
  static constexpr size_t kLongestSecret = 32;  // a longer one is wrong in any case
  std::map<uint64_t, SessionCaller> callers_;   // by session
  grpc::ByteBuffer incoming_;
  const std::shared_ptr<FrameQueue> queue_;
  PayloadPath path_;
  trace::Tracer* const tracer_;       // null: no traces
  trace::Span span_;                  // with it: of this stream
  std::unique_ptr<StepSpans> spans_;  // likewise
};

}  // namespace precondor::rpc

// SPDX-License-Identifier: Apache-2.0
// The server's side of one Exchange stream: decodes frames, submits contributions to the shard and sends the answers.
#pragma once

#include <atomic>
#include <cstdint>
#include <grpcpp/grpcpp.h>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "precondor/v1/precondition.pb.h"
#include "proto/wire/chunk_assembler.h"
#include "proto/wire/shared_channel.h"
#include "proto/wire/shared_memory.h"
#include "server/core/api/observer.h"
#include "server/core/shard/shard_data_plane.h"
#include "server/rpc/frame_queue.h"
#include "server/rpc/payload_path.h"
#include "server/rpc/shared_regions.h"
#include "server/rpc/step_spans.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Bounds the memory that streams share with workers of this host for their messages. Thread-safe. Lifetime: outlives
// its holds.
class SharedMemoryLimit {
 public:
  // With `most_bytes` 0, no stream gets memory.
  explicit SharedMemoryLimit(int64_t most_bytes) : most_bytes_(most_bytes) {}

  struct GiveBack {
    void operator()(SharedMemoryLimit* limit) const { limit->bytes_.fetch_sub(kBytes); }
  };
  // The right to the memory of one stream; it ends with this object.
  using Hold = std::unique_ptr<SharedMemoryLimit, GiveBack>;

  // Whether to offer memory to `peer`, as gRPC names the peer of a call: it is on this host.
  bool MayOffer(const std::string& peer) const;
  // Returns RESOURCE_EXHAUSTED (CAPACITY) if other streams have all of it.
  absl::StatusOr<Hold> Take();

 private:
  static constexpr int64_t kBytes = static_cast<int64_t>(wire::SharedMemory::kBytes);

  const int64_t most_bytes_;
  std::atomic<int64_t> bytes_ = 0;
};

// Handles one Exchange call. Lifetime: the object owns itself and deletes itself in OnDone. Threads: one gRPC thread at
// a time reads; any thread can push answers to the FrameQueue. A contribution that is refused gets an ERROR frame, and
// the stream continues. A frame that cannot be decoded ends the stream with INVALID_ARGUMENT.
class ExchangeStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // `open_payloads` is shared by all streams, as `shared_memory` is, which is null for a peer of another host.
  // `shard_generation`: see PreconditionService. `regions`: see PayloadPath. `caller` is the trace context in the
  // client's traceparent, if any.
  ExchangeStream(ShardDataPlane& shard, const std::string& backend, uint64_t credit_bytes, OpenPayloads& open_payloads,
                 uint64_t shard_generation, SharedRegions* regions, SharedMemoryLimit* shared_memory,
                 const ControlRunner& runner, TransferObserver& observer, const std::optional<TraceContext>& caller);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // Handles a message, which holds one frame or a bundle. An error ends the stream.
  absl::Status Handle(absl::StatusOr<wire::Received<v1::ExchangeRequest>> frame)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);
  // Handles a message that has come through shared memory. Returns false if the stream must read no more for now.
  bool HandleShared(absl::string_view message);
  bool Write(const grpc::ByteBuffer* message, bool more);
  void Resume();
  // Returns UNAVAILABLE (NOT_ACTIVE) if the shard has removed the frame's session and installed it again since the
  // stream began.
  absl::Status CheckGeneration(const v1::ExchangeRequest& frame) const;
  void HandleFrame(const v1::ExchangeRequest& message, const wire::ReceivedBytes& payload)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);
  // Handles frames of a bundle from `first` on: one, or as many as refer to slots and can be inspected together.
  // Returns their number.
  int HandleFirst(const v1::ExchangeRequest& bundle, absl::Span<const wire::ReceivedBytes> payloads, int first)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);
  // Returns the caller with the last secret that a frame of this session has shown on the stream, this frame included.
  const SessionCaller& CallerOf(const v1::FrameHeader& header);
  void Fetch(const v1::FrameHeader& header);
  void OpenRing(const v1::ExchangeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);
  // Creates the shared memory for the stream's messages.
  absl::StatusOr<v1::Ring> OpenSharedMemory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);
  // Handles frames of different layers whose payloads are in slots of the stream's region.
  struct SlotFrame {
    const v1::FrameHeader* header;
    wire::ReceivedBytes payload;
  };
  void SubmitInRing(absl::Span<const SlotFrame> frames) ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);
  struct SlotContribution {
    const v1::FrameHeader* header;
    AdmittedContribution admitted;
    StreamRegion::Gradient gradient;
  };
  void SubmitInspected(SlotContribution taken, absl::Time began);
  // Admits the contribution of a frame that refers to a slot, and takes the slot. Takes no slot if it fails.
  absl::StatusOr<SlotContribution> TakeFromRing(const v1::FrameHeader& header, const wire::ReceivedBytes& payload);
  // `answer` sends the answer; null for statistics. `slot` is the gradient's, if it is in the ring.
  void Submit(AdmittedContribution admitted, const v1::FrameHeader& header, Payload payload, absl::Time began,
              ResultFn answer, std::optional<StreamRegion::Gradient> slot = std::nullopt);
  std::shared_ptr<StepSpan> SpanOf(const v1::FrameHeader& header) {
    return spans_ == nullptr ? nullptr : spans_->Of(header);
  }
  // Closes the queue and finishes the call with `status`. Has an effect only for the first caller.
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
  // A contribution of which only a part has arrived.
  struct Incoming {
    AdmittedContribution admitted;
    absl::Time began;         // when the first frame arrived
    OpenPayloads::Hold hold;  // null if the first frame held the whole payload
  };
  using IncomingKey = std::tuple<uint64_t, uint64_t, uint64_t, uint32_t, uint32_t, uint64_t, int>;
  static IncomingKey KeyOf(const v1::FrameHeader& header);
  // The partial contributions that path_ assembles, by session, epoch, step, layer, rank, incarnation and kind.
  std::map<IncomingKey, Incoming> open_;
  static constexpr size_t kMaxCallers = 64;     // with more sessions on a stream, a client shows their secrets again
  static constexpr size_t kLongestSecret = 32;  // bytes; no session has a longer secret
  std::map<uint64_t, SessionCaller> callers_;   // by session
  grpc::ByteBuffer incoming_;
  SharedMemoryLimit* const shared_memory_;  // null if the stream is offered none
  SharedMemoryLimit::Hold shared_hold_;
  std::unique_ptr<wire::SharedChannel> shared_;  // set before the client knows of it
  std::atomic<bool> uses_shared_ = false;        // the client has sent a message through `shared_`
  std::atomic<bool> ended_ = false;              // End has been called
  Mutex reading_;  // held while a message is handled: a hostile client can send on both ways at once
  bool begun_ ABSL_GUARDED_BY(reading_) = false;       // the client has sent a message
  absl::Status ring_fault_ ABSL_GUARDED_BY(reading_);  // ends the stream, and the client repeats its gradients inline
  bool declined_ ABSL_GUARDED_BY(reading_) = false;    // it has sent one by gRPC although it has shared memory
  const std::shared_ptr<FrameQueue> queue_;
  PayloadPath path_;
  trace::Tracer* const tracer_;       // null if the server does not trace
  trace::Span span_;                  // the span of this stream; unused if tracer_ is null
  std::unique_ptr<StepSpans> spans_;  // null if tracer_ is null
};

}  // namespace precondor::rpc

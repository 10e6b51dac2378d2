// SPDX-License-Identifier: Apache-2.0
// How the payloads of one Exchange stream travel: inline, as bytes of frames, or in slots of a region that the shard
// shares with the stream's worker. An answer goes the way that its gradient came, and inline where that is not
// possible. Gradients on a communicator do not come by a stream (server/plane).
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

#include "precondor/v1/precondition.pb.h"
#include "proto/wire/chunk_assembler.h"
#include "proto/wire/frame_codec.h"
#include "server/core/shard/shard.h"
#include "server/core/transfer_observer.h"
#include "server/rpc/frame_queue.h"
#include "server/rpc/shared_regions.h"

namespace precondor::rpc {

// Used by one thread at a time, that which reads the stream. The callbacks that it makes are called on any thread, and
// may outlive it: a region lives for as long as a gradient in one of its slots is unanswered. `queue` owes the answers.
class PayloadPath {
 public:
  // `regions`: where the peer can have one; null: all payloads go inline. `credit_bytes` may be open inline.
  PayloadPath(SharedRegions* regions, uint64_t credit_bytes, std::shared_ptr<FrameQueue> queue,
              TransferObserver& observer)
      : regions_(regions),
        queue_(std::move(queue)),
        observer_(observer),
        assembler_(wire::AssemblerLimits{.max_open_bytes = credit_bytes}) {}

  // Adds the region that the peer can ask for to the stream's first frame.
  void Offer(v1::ExchangeResponse& credit) const;
  // The worker asks for the stream's region. FailedPrecondition (MALFORMED): none was offered, or there is one already.
  // Otherwise the errors of SharedRegions::Open. After an error all payloads go inline.
  absl::StatusOr<v1::Ring> Open(const v1::Ring& request);

  // Takes in a frame with an inline payload, or a part of one; see ChunkAssembler::Add.
  absl::StatusOr<wire::ChunkAssembler::Result> AddInline(
      const v1::FrameHeader& header, const wire::ReceivedBytes& payload,
      absl::FunctionRef<absl::Status(const v1::FrameHeader&)> admit) {
    return assembler_.Add(header, payload, admit);
  }
  // Takes the gradient [rows, cols] in the slot that a frame refers to. InvalidArgument (MALFORMED): the stream has no
  // region, or the frame has a payload beside the slot. Otherwise the errors of StreamRegion::Take.
  absl::StatusOr<StreamRegion::Gradient> TakeSlot(const v1::FrameHeader& header, const wire::ReceivedBytes& payload,
                                                  int64_t rows, int64_t cols);

  // Gives the answer to a contribution with an inline payload, and then to one in a slot, whose slot it gives back.
  ResultFn AnswerInline(const v1::FrameHeader& contribution) const;
  ResultFn AnswerInSlot(const v1::FrameHeader& contribution, const StreamRegion::Gradient& gradient) const;
  // Pushes a result, or its error, as frames with inline payloads.
  static void Push(FrameQueue& queue, TransferObserver& observer, const v1::FrameHeader& contribution,
                   const absl::StatusOr<GradientResult>& result);

  // The worker has ended the stream in order, and so has unmapped the region.
  void NoteUnmapped();

 private:
  SharedRegions* const regions_;
  const std::shared_ptr<FrameQueue> queue_;
  TransferObserver& observer_;
  wire::ChunkAssembler assembler_;
  std::shared_ptr<StreamRegion> region_;  // null: none was asked for
};

}  // namespace precondor::rpc

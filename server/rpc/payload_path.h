// SPDX-License-Identifier: Apache-2.0
// Transfers the payloads of one Exchange stream: inline, as bytes of frames, or in slots of a region that the shard
// shares with the stream's worker. An answer travels the way that its gradient did, or inline if that is not possible.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "precondor/v1/precondition.pb.h"
#include "proto/wire/chunk_assembler.h"
#include "proto/wire/frame_codec.h"
#include "server/core/api/transfer_observer.h"
#include "server/core/shard/shard.h"
#include "server/rpc/frame_queue.h"
#include "server/rpc/shared_regions.h"

namespace precondor::rpc {

// Assembles inline payloads, takes slots, and makes the callbacks that send answers. Threads: only the thread that
// reads the stream uses it. The callbacks run on any thread and can outlive it; a region lives while a gradient in one
// of its slots has no answer.
class PayloadPath {
 public:
  // `regions` allocates the stream's region; null means that all payloads travel inline. `credit_bytes` limits the
  // inline payloads that are incomplete at a time. The callbacks push answers to `queue` and call its MarkAnswered.
  PayloadPath(SharedRegions* regions, uint64_t credit_bytes, std::shared_ptr<FrameQueue> queue,
              TransferObserver& observer)
      : regions_(regions),
        queue_(std::move(queue)),
        observer_(observer),
        assembler_(wire::AssemblerLimits{.max_open_bytes = credit_bytes}) {}

  // Adds the region that the peer can request to `credit`, the stream's first frame.
  void Offer(v1::ExchangeResponse& credit) const;
  // Opens the region that the worker requests for the stream, and returns its size and handle. Returns
  // FAILED_PRECONDITION (MALFORMED) if no region was offered or the stream has one, and otherwise the errors of
  // SharedRegions::Open.
  absl::StatusOr<v1::Ring> Open(const v1::Ring& request);

  // Adds a frame with an inline payload or a chunk of one; see ChunkAssembler::Add.
  absl::StatusOr<wire::ChunkAssembler::Result> AddInline(
      const v1::FrameHeader& header, const wire::ReceivedBytes& payload,
      absl::FunctionRef<absl::Status(const v1::FrameHeader&)> admit) {
    return assembler_.Add(header, payload, admit);
  }
  // Takes the gradient [rows, cols] in the slot that a frame refers to. Returns INVALID_ARGUMENT (MALFORMED) if the
  // stream has no region, or if the frame has a payload or a chunk offset; otherwise the errors of StreamRegion::Take.
  // Pass it to Inspect before the shard uses it.
  absl::StatusOr<StreamRegion::Gradient> TakeSlot(const v1::FrameHeader& header, const wire::ReceivedBytes& payload,
                                                  int64_t rows, int64_t cols);
  // Inspects gradients that TakeSlot has returned; see StreamRegion::Inspect.
  absl::Status Inspect(absl::Span<const StreamRegion::Gradient> gradients) {
    return gradients.empty() ? absl::OkStatus() : region_->Inspect(gradients);
  }

  // Returns a callback that answers a contribution with an inline payload.
  ResultFn AnswerInline(const v1::FrameHeader& contribution) const;
  // Returns a callback that answers `gradient`: it writes the answer to the gradient's slot, or sends it inline if
  // there is no answer in device memory or the write fails. It also gives the slot back to the worker.
  ResultFn AnswerInSlot(const v1::FrameHeader& contribution, const StreamRegion::Gradient& gradient) const;
  // Pushes a result as frames with inline payloads, or an ERROR frame.
  static void Push(FrameQueue& queue, TransferObserver& observer, const v1::FrameHeader& contribution,
                   const absl::StatusOr<GradientResult>& result);

  // Records that the worker has unmapped the region, which it does before it ends the stream in order.
  void NoteUnmapped();

 private:
  SharedRegions* const regions_;
  const std::shared_ptr<FrameQueue> queue_;
  TransferObserver& observer_;
  wire::ChunkAssembler assembler_;
  std::shared_ptr<StreamRegion> region_;  // null if the worker has opened none
};

}  // namespace precondor::rpc

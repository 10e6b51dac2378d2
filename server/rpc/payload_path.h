// SPDX-License-Identifier: Apache-2.0
// The payloads of contributions and answers on their way. Those of an Exchange stream travel inline, as bytes of
// frames, or in slots of a region that the shard shares with the stream's worker. An answer travels the way that its
// gradient did, or inline if that is not possible.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/chunk_assembler.h"
#include "proto/wire/frame_codec.h"
#include "server/core/api/observer.h"
#include "server/core/shard/shard.h"
#include "server/rpc/frame_queue.h"
#include "server/rpc/shared_regions.h"

namespace precondor::rpc {

// Counts the payloads that each rank has begun and not completed, over all its streams, so that a rank cannot make the
// server use more memory by opening more streams. Thread-safe. Lifetime: outlives its holds.
class OpenPayloads {
 private:
  using Rank = std::pair<uint64_t, uint32_t>;  // session and rank

 public:
  // A rank can have two streams if one has broken and the server has not noticed yet. Each can hold `credit_bytes`, or
  // one larger payload.
  explicit OpenPayloads(uint64_t credit_bytes) : most_bytes_(2 * credit_bytes) {}

  struct GiveBack {
    Rank rank;
    uint64_t bytes = 0;
    void operator()(OpenPayloads* payloads) const { payloads->End(rank, bytes); }
  };
  // A counted payload; the count ends with this object.
  using Hold = std::unique_ptr<OpenPayloads, GiveBack>;

  // Counts a payload of `bytes` for the key's rank. Returns RESOURCE_EXHAUSTED (CAPACITY) if the rank has two payloads
  // or more and would have more than twice the credit. The client can retry.
  absl::StatusOr<Hold> Begin(const ContributionKey& key, uint64_t bytes);

 private:
  struct OfRank {
    uint64_t payloads = 0, bytes = 0;
  };
  void End(const Rank& rank, uint64_t bytes);

  const uint64_t most_bytes_;
  Mutex mu_;
  absl::flat_hash_map<Rank, OfRank> ranks_ ABSL_GUARDED_BY(mu_);  // only ranks with incomplete payloads
};

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
  absl::StatusOr<wire::ChunkAssembler::Result> AddInline(const v1::FrameHeader& header,
                                                         const wire::ReceivedBytes& payload,
                                                         wire::ChunkAssembler::Admission admit) {
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

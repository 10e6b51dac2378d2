// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/payload_path.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/slot_table.h"
#include "proto/wire/tensor_codec.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {
namespace {

v1::ExchangeResponse ResultFrame(const v1::FrameHeader& contribution, const GradientResult& result) {
  v1::ExchangeResponse response;
  *response.mutable_header() = AnswerHeader(contribution, v1::FRAME_KIND_RESULT);
  if (contribution.kind() != v1::FRAME_KIND_GRADIENT) response.set_contribution(contribution.kind());
  EncodeResult(result, *response.mutable_header(), *response.mutable_outcome());
  return response;
}

void PushResult(FrameQueue& queue, TransferObserver& observer, const v1::FrameHeader& contribution,
                const GradientResult& result) {
  v1::ExchangeResponse response = ResultFrame(contribution, result);
  observer.OnSent(TransferPath::kStream,
                  contribution.kind() == v1::FRAME_KIND_FETCH ? TransferKind::kFactors : TransferKind::kAnswer,
                  result.payload_bytes());
  if (result.bytes == nullptr) return queue.Push(std::move(response));
  for (const wire::Chunk& chunk : wire::PlanChunks(result.bytes->size())) {
    response.mutable_header()->set_chunk_offset(chunk.offset);
    queue.Push(response, {result.bytes->data() + chunk.offset, chunk.size, result.bytes});
  }
}

}  // namespace

absl::StatusOr<OpenPayloads::Hold> OpenPayloads::Begin(const ContributionKey& key, uint64_t bytes) {
  const Rank rank = {key.session_id, key.rank};
  const MutexLock lock(mu_);
  OfRank& open = ranks_[rank];
  if (open.payloads >= 2 && open.bytes + bytes > most_bytes_) {
    return ReasonedStatus(
        absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
        absl::StrCat("session ", key.session_id, " step ", key.step, " layer ", key.layer, " rank ", key.rank,
                     ": expected at most ", most_bytes_, " bytes begun and not ended on all streams of a rank, got ",
                     bytes, " on top of ", open.bytes, " in ", open.payloads, " contributions"));
  }
  ++open.payloads;
  open.bytes += bytes;
  return Hold(this, GiveBack{rank, bytes});
}

void OpenPayloads::End(const Rank& rank, uint64_t bytes) {
  const MutexLock lock(mu_);
  const auto open = ranks_.find(rank);
  open->second.bytes -= bytes;
  if (--open->second.payloads == 0) ranks_.erase(open);
}

void PayloadPath::Offer(v1::ExchangeResponse& credit) const {
  if (regions_ != nullptr) *credit.add_ring_offers() = regions_->Offer();
}

absl::StatusOr<v1::Ring> PayloadPath::Open(const v1::Ring& request) {
  if (regions_ == nullptr || region_ != nullptr) {
    return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kMalformed,
                          regions_ == nullptr ? "ring: expected none, since none was offered"
                                              : "ring: expected one a stream, got another request");
  }
  PRECONDOR_ASSIGN_OR_RETURN(region_, regions_->Open(request));
  v1::Ring granted = request;
  granted.set_bytes(static_cast<uint64_t>(region_->memory().bytes()));
  granted.set_handle(region_->memory().handle());
  return granted;
}

absl::StatusOr<StreamRegion::Gradient> PayloadPath::TakeSlot(const v1::FrameHeader& header,
                                                             const wire::ReceivedBytes& payload, int64_t rows,
                                                             int64_t cols) {
  if (region_ == nullptr || payload.size() > 0 || header.chunk_offset() > 0) {
    return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                          region_ == nullptr ? "header.ring_offset: expected none on a stream without a ring"
                                             : "header.ring_offset: expected a frame without payload, got one with");
  }
  return region_->Take(header.ring_offset(), rows, cols);
}

void PayloadPath::Push(FrameQueue& queue, TransferObserver& observer, const v1::FrameHeader& contribution,
                       const absl::StatusOr<GradientResult>& result) {
  // The answer is in device memory if the gradient was sent in a slot, now or earlier.
  const absl::StatusOr<GradientResult> host = result.ok() ? OnHost(*result) : result;
  if (host.ok()) {
    PushResult(queue, observer, contribution, *host);
  } else {
    PushError(queue, contribution, host.status());
  }
}

ResultFn PayloadPath::AnswerInline(const v1::FrameHeader& contribution) const {
  return [queue = queue_, &observer = observer_, contribution](const absl::StatusOr<GradientResult>& result) {
    Push(*queue, observer, contribution, result);
    queue->MarkAnswered();
  };
}

ResultFn PayloadPath::AnswerInSlot(const v1::FrameHeader& contribution, const StreamRegion::Gradient& gradient) const {
  return [queue = queue_, region = gradient.region, slot = gradient.slot, &observer = observer_,
          contribution](const absl::StatusOr<GradientResult>& result) {
    const auto send = [=, &observer](const absl::Status& written) {
      region->GiveBack(slot);
      if (written.ok()) {
        observer.OnSent(TransferPath::kRing, TransferKind::kAnswer, result->payload_bytes());
        v1::ExchangeResponse response = ResultFrame(contribution, *result);
        response.mutable_header()->set_ring_offset(slot.offset);
        queue->Push(std::move(response));
      } else {
        Push(*queue, observer, contribution, result);
      }
      queue->MarkAnswered();
    };
    if (!result.ok() || result->on_device == nullptr) return send(absl::NotFoundError("no answer in device memory"));
    region->Write(slot, result->on_device->view(), send);
  };
}

void PayloadPath::NoteUnmapped() {
  if (region_ != nullptr) region_->NoteUnmapped();
}

}  // namespace precondor::rpc

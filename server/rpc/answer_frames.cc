// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/answer_frames.h"

#include <utility>

#include "proto/wire/status_codec.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {

void PushError(FrameQueue& queue, const v1::FrameHeader& contribution, const absl::Status& status) {
  v1::ExchangeResponse response;
  *response.mutable_header() = AnswerHeader(contribution, v1::FRAME_KIND_ERROR);
  response.set_contribution(contribution.kind());
  *response.mutable_error() = wire::ToErrorDetail(status);
  queue.Push(std::move(response));
}

void PushAck(FrameQueue& queue, const v1::FrameHeader& contribution, bool duplicate, uint64_t updates_lost) {
  v1::ExchangeResponse response;
  *response.mutable_header() = AnswerHeader(contribution, v1::FRAME_KIND_ACK);
  response.set_contribution(contribution.kind());
  response.set_duplicate(duplicate);
  response.set_updates_lost(updates_lost);
  queue.Push(std::move(response));
}

}  // namespace precondor::rpc

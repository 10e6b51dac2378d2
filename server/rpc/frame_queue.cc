// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/frame_queue.h"

#include <utility>

#include "absl/status/statusor.h"

#include "proto/wire/status_codec.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {
namespace {

// Estimated memory of a queued frame beyond its encoded bytes: message objects, strings and tensor headers.
constexpr size_t kFrameOverheadBytes = 1024;

}  // namespace

void FrameQueue::Push(v1::ExchangeResponse frame, wire::PayloadPart payload) {
  MutexLock lock(mu_);
  if (closed_) return;
  const size_t bytes = kFrameOverheadBytes + frame.ByteSizeLong() + payload.size;
  waiting_bytes_ += bytes;
  const v1::FrameHeader& header = frame.header();
  std::optional<absl::Time> answered;
  if (events_.now && header.kind() == v1::FRAME_KIND_RESULT &&
      header.chunk_offset() + payload.size >= header.payload_bytes()) {
    answered = events_.now();
  }
  frames_.push_back({std::move(frame), std::move(payload), bytes, answered});
  WriteNext();
}

void FrameQueue::Written() {
  grpc::ByteBuffer written;  // its payload is freed without the lock
  MutexLock lock(mu_);
  written.Swap(&writing_message_);
  writing_ = false;
  if (!closed_ && writing_answered_.has_value()) events_.replied(events_.now() - *writing_answered_);
  WriteNext();
  CheckDrained();
}

bool FrameQueue::PauseWhenFull() {
  MutexLock lock(mu_);
  paused_ = waiting_bytes_ > limit_bytes_;
  return paused_;
}

void FrameQueue::AllowBundles() {
  MutexLock lock(mu_);
  bundles_ = true;
}

void FrameQueue::Hold() {
  MutexLock lock(mu_);
  held_ = true;
}

void FrameQueue::Release() {
  MutexLock lock(mu_);
  held_ = false;
  WriteNext();
  CheckDrained();
}

void FrameQueue::AddPendingAnswer() {
  MutexLock lock(mu_);
  ++owed_;
}

void FrameQueue::MarkAnswered() {
  MutexLock lock(mu_);
  --owed_;
  CheckDrained();
}

bool FrameQueue::AddNamedPendingAnswer(const std::string& name) {
  MutexLock lock(mu_);
  if (waiting_bytes_ > limit_bytes_ || !owed_once_.insert(name).second) return false;
  ++owed_;
  return true;
}

void FrameQueue::MarkAnsweredOnce(const std::string& name) {
  MutexLock lock(mu_);
  owed_once_.erase(name);
  --owed_;
  CheckDrained();
}

void FrameQueue::HalfClose() {
  MutexLock lock(mu_);
  half_closed_ = true;
  CheckDrained();
}

bool FrameQueue::Close() {
  MutexLock lock(mu_);
  return !std::exchange(closed_, true);
}

void FrameQueue::WriteNext() {
  while (!closed_ && !writing_ && !held_ && !frames_.empty()) {
    Frame next = TakeBundle();
    std::vector<wire::PayloadPart> parts;
    if (next.payload.size > 0) parts.push_back(std::move(next.payload));
    // Encoding never fails for the server's own frames: their fields are bounded, and no payload exceeds a chunk.
    absl::StatusOr<grpc::ByteBuffer> message = wire::EncodeFrame(next.message, parts);
    if (!message.ok()) continue;
    writing_message_ = *std::move(message);
    writing_ = true;
    writing_answered_ = next.answered;
    events_.write(&writing_message_, !frames_.empty());
  }
  if (paused_ && !closed_ && waiting_bytes_ <= limit_bytes_) {
    paused_ = false;
    events_.resume();
  }
}

FrameQueue::Frame FrameQueue::TakeFront() {
  Frame front = std::move(frames_.front());
  frames_.pop_front();
  waiting_bytes_ -= front.bytes;
  return front;
}

FrameQueue::Frame FrameQueue::TakeBundle() {
  Frame first = TakeFront();
  size_t bytes = first.bytes - kFrameOverheadBytes;
  const auto joins = [&](const Frame& frame) {
    return frame.payload.size == 0 && (bytes += frame.bytes - kFrameOverheadBytes) <= wire::kMaxBundleBytes;
  };
  if (!bundles_ || first.payload.size > 0 || frames_.empty() || !joins(frames_.front())) return first;
  Frame bundle;
  bundle.answered = first.answered;
  *bundle.message.add_bundle() = std::move(first.message);
  do {
    Frame next = TakeFront();
    if (!bundle.answered.has_value()) bundle.answered = next.answered;
    *bundle.message.add_bundle() = std::move(next.message);
  } while (!frames_.empty() && joins(frames_.front()));
  return bundle;
}

void FrameQueue::CheckDrained() {
  if (closed_ || !half_closed_ || owed_ != 0 || writing_ || !frames_.empty()) return;
  closed_ = true;
  events_.drained();
}

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

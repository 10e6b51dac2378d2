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

// Upper limit of what a bundle adds to a small frame: tag, length and its `bundled_bytes`.
constexpr size_t kBundleEntryBytes = 8;

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
  EndWrite();
  WriteNext();
  CheckDrained();
}

void FrameQueue::EndWrite() {
  writing_ = false;
  if (!closed_ && writing_answered_.has_value()) events_.replied(events_.now() - *writing_answered_);
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
    std::vector<Frame> next = TakeNext();
    v1::ExchangeResponse bundle;
    std::vector<wire::PayloadPart> parts;
    std::optional<absl::Time> answered;
    for (Frame& frame : next) {
      if (!answered.has_value()) answered = frame.answered;
      if (next.size() > 1) {
        bundle.add_bundled_bytes(frame.payload.size);
        *bundle.add_bundle() = std::move(frame.message);
      }
      if (frame.payload.size > 0) parts.push_back(std::move(frame.payload));
    }
    // Encoding never fails for the server's own frames: their fields are bounded, and no payload exceeds a chunk.
    absl::StatusOr<grpc::ByteBuffer> message =
        wire::EncodeFrame(next.size() > 1 ? bundle : next.front().message, parts);
    if (!message.ok()) continue;
    writing_message_ = *std::move(message);
    writing_ = true;
    writing_answered_ = answered;
    if (!events_.write(&writing_message_, !frames_.empty())) break;
    writing_message_.Clear();
    EndWrite();
  }
  if (paused_ && !closed_ && waiting_bytes_ <= limit_bytes_) {
    paused_ = false;
    events_.resume();
  }
}

std::vector<FrameQueue::Frame> FrameQueue::TakeNext() {
  std::vector<Frame> taken;
  size_t payload_bytes = 0, header_bytes = 0;
  const auto joins = [&](const Frame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    payload_bytes += frame.payload.size;
    header_bytes += frame.bytes - frame.payload.size - kFrameOverheadBytes + kBundleEntryBytes;
    return bundles_ && taken.size() < wire::kMaxBundleFrames && frame.payload.size < wire::kMaxBundledFrameBytes &&
           payload_bytes <= wire::kMaxBundlePayloadBytes && header_bytes <= wire::kMaxBundleHeaderBytes;
  };
  bool more = joins(frames_.front());
  do {
    waiting_bytes_ -= frames_.front().bytes;
    taken.push_back(std::move(frames_.front()));
    frames_.pop_front();
    more = more && !frames_.empty() && joins(frames_.front());
  } while (more);
  return taken;
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

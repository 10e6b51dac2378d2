// SPDX-License-Identifier: Apache-2.0
// Writes a link's frames. Several small ones share a message.
#include <utility>
#include <vector>

#include "client/cpp/src/shard_link.h"
#include "client/cpp/src/shard_link_stream.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/spec_codec.h"

namespace precondor {
namespace {

// Upper limits of a frame's header, without parts, and of a part.
constexpr size_t kHeaderBytes = 160;
constexpr size_t kPartBytes = 32;

// Decides which frames share a message.
class Bundle {
 public:
  // Returns false if the frame does not fit any more, or must not be in a bundle.
  bool Add(const Outbox::Frame& frame) {
    payload_bytes_ += frame.chunk.size;
    header_bytes_ += kHeaderBytes + frame.item->parts.size() * kPartBytes;
    const bool whole = frame.chunk.size == frame.item->payload.size();
    return whole && frame.chunk.size < wire::kMaxBundledFrameBytes && payload_bytes_ <= wire::kMaxBundlePayloadBytes &&
           header_bytes_ <= wire::kMaxBundleHeaderBytes;
  }

 private:
  size_t payload_bytes_ = 0, header_bytes_ = 0;
};

}  // namespace

std::optional<Outbox::Frame> ShardLink::NextFrame(absl::Time now) {
  if (!ahead_.has_value()) return outbox_.Next(now);
  return std::exchange(ahead_, std::nullopt);
}

void ShardLink::Pump() {
  held_ = 0;
  while (state_ == StreamState::kOpen && !writing_ && WriteNext()) {
  }
}

bool ShardLink::WriteNext() {
  if (std::optional<v1::Ring> request = path_.TakeRequest()) {
    WriteRegionRequest(*std::move(request));
    return true;
  }
  const absl::Time now = MonotonicNow();
  std::optional<Outbox::Frame> frame = NextFrame(now);
  if (!frame.has_value()) return false;
  Bundle bundle;
  const bool small = bundle.Add(*frame);
  const bool last = frame->chunk.offset + frame->chunk.size == frame->item->payload.size();
  std::vector<Outbox::Frame> frames = {*std::move(frame)};
  if (small) {
    // Small frames that are ready travel in one message. A message may wait in gRPC (`more`) only if the next frame is
    // certain.
    while ((ahead_ = NextFrame(now)).has_value() && bundles_ && bundle.Add(*ahead_)) {
      frames.push_back(*std::exchange(ahead_, std::nullopt));
    }
  }
  WriteFrames(frames, !last || ahead_.has_value());
  return true;
}

void ShardLink::WriteFrames(const std::vector<Outbox::Frame>& frames, bool more) {
  v1::ExchangeRequest request;
  std::vector<wire::PayloadPart> parts;
  int64_t payload_bytes = 0;
  for (const Outbox::Frame& frame : frames) {
    const Contribution& item = *frame.item;
    v1::ExchangeRequest* const message = frames.size() > 1 ? request.add_bundle() : &request;
    *message->mutable_header() = MakeHeader(item);
    const absl::Span<const uint8_t> inlined = PayloadPath::Describe(item, frame.chunk, *message->mutable_header());
    if (!inlined.empty()) parts.push_back({inlined.data(), inlined.size(), item.payload_owner});
    if (frames.size() > 1) request.add_bundled_bytes(inlined.size());
    const int64_t bytes = static_cast<int64_t>(inlined.size());
    auto& counter = item.id.kind == v1::FRAME_KIND_GRADIENT ? traffic_.gradient_bytes : traffic_.statistics_bytes;
    counter.fetch_add(bytes, std::memory_order_relaxed);
    payload_bytes += bytes;
  }
  absl::StatusOr<grpc::ByteBuffer> buffer = wire::EncodeFrame(request, parts);
  PRECONDOR_CHECK(buffer.ok());  // chunks and bundles are far below the message limit
  traffic_.overhead_bytes.fetch_add(static_cast<int64_t>(buffer->Length()) - payload_bytes, std::memory_order_relaxed);
  Write(*buffer, more);
}

void ShardLink::WriteRegionRequest(v1::Ring wanted) {
  v1::ExchangeRequest request;
  request.mutable_header()->set_session_id(options_.session_id);
  request.mutable_header()->set_kind(v1::FRAME_KIND_RING);
  *request.mutable_ring() = std::move(wanted);
  absl::StatusOr<grpc::ByteBuffer> buffer = wire::EncodeFrame(request, {});
  PRECONDOR_CHECK(buffer.ok());
  Write(*buffer, /*more=*/false);
}

void ShardLink::Write(const grpc::ByteBuffer& message, bool more) {
  writing_ = true;  // first: gRPC may report the write's end before Write returns
  if (stream_->Write(message, more)) writing_ = false;
}

v1::FrameHeader ShardLink::MakeHeader(const Contribution& item) {
  v1::FrameHeader header;
  header.set_session_id(options_.session_id);
  header.set_epoch(epoch_);
  header.set_step(item.id.step);
  header.set_layer(item.id.layer);
  header.set_rank(options_.rank);
  header.set_incarnation(options_.incarnation);
  header.set_kind(item.id.kind);
  header.set_mode(wire::EncodeMode(item.mode));
  header.set_samples(item.samples);
  header.set_abstain(item.abstain);
  for (const v1::TensorHeader& tensor : item.tensors) *header.add_tensors() = tensor;
  for (const GradientPart& part : item.parts) {
    v1::GradientPart& out = *header.add_parts();
    out.set_row(static_cast<uint32_t>(part.row));
    out.set_rows(static_cast<uint32_t>(part.rows));
    out.set_col(static_cast<uint32_t>(part.col));
    out.set_cols(static_cast<uint32_t>(part.cols));
    out.set_only_receives(!part.sent);
  }
  header.set_factor_version(item.factor_version);
  if (item.next_step.has_value()) header.set_next_step(*item.next_step);
  if (!std::exchange(showed_secret_, true)) header.set_secret(options_.secret);
  return header;
}

void ShardLink::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (ok) Pump();  // otherwise the read fails too, and the stream ends
}

}  // namespace precondor

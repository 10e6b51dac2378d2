// SPDX-License-Identifier: Apache-2.0
// Reads and writes a link's frames. Several small ones share a message.
#include <grpcpp/support/byte_buffer.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/shard_link.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/spec_codec.h"
#include "proto/wire/status_codec.h"

namespace precondor {
namespace {

constexpr absl::Duration kRetryPause = absl::Milliseconds(20);  // after the first temporary refusal

// Differs by rank, so that ranks refused at one time do not retry at one time.
absl::Duration RetryPause(uint32_t rank) { return kRetryPause * (1 + rank % 16 / 32.0); }

// Returns the kind of the contribution that a RESULT answers. A gradient's RESULT may leave it out.
v1::FrameKind ResultOf(const v1::ExchangeResponse& message) {
  const v1::FrameKind kind = message.contribution();
  return kind == v1::FRAME_KIND_UNSPECIFIED ? v1::FRAME_KIND_GRADIENT : kind;
}

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

std::optional<ContributionId> ShardLink::MatchKey(const v1::FrameHeader& header, v1::FrameKind kind) const {
  MutexLock lock(mu_);
  if (header.session_id() != options_.session_id || header.epoch() != epoch_) return std::nullopt;
  return ContributionId{kind, header.step(), header.layer()};
}

void ShardLink::OnRead(absl::StatusOr<wire::Received<v1::ExchangeResponse>> frame, size_t bytes) {
  if (!frame.ok()) {
    OnProtocolError(frame.status());
    return;
  }
  const int64_t payload_bytes = static_cast<int64_t>(frame->payload.size());
  traffic_.result_bytes.fetch_add(payload_bytes, std::memory_order_relaxed);
  traffic_.overhead_bytes.fetch_add(static_cast<int64_t>(bytes) - payload_bytes, std::memory_order_relaxed);
  if (frame->message.bundle_size() == 0) return OnFrame(frame->message, frame->payload);
  const absl::StatusOr<std::vector<wire::ReceivedBytes>> payloads = wire::TakeBundledPayloads(*frame);
  if (!payloads.ok()) return OnProtocolError(payloads.status());
  for (int i = 0; i < frame->message.bundle_size(); ++i) OnFrame(frame->message.bundle(i), (*payloads)[i]);
}

void ShardLink::OnFrame(const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload) {
  const uint64_t epoch = message.header().epoch();
  switch (message.header().kind()) {
    case v1::FRAME_KIND_CREDIT:
      OnCredit(message);
      return;
    case v1::FRAME_KIND_RING:
      OnRing(message.ring());
      return;
    case v1::FRAME_KIND_ACK:
      if (const auto id = MatchKey(message.header(), message.contribution())) OnAck(*id, epoch, message.updates_lost());
      return;
    case v1::FRAME_KIND_RESULT:
      if (const auto id = MatchKey(message.header(), ResultOf(message))) OnResult(*id, message, payload);
      return;
    case v1::FRAME_KIND_ERROR: {
      const absl::Status status = wire::FromErrorDetail(message.error());
      if (message.contribution() == v1::FRAME_KIND_RING) return OnRingRefused(status);
      if (const auto id = MatchKey(message.header(), message.contribution())) {
        OnRefused(*id, epoch, status);
      } else if (message.header().session_id() != options_.session_id) {
        OnProtocolError(status);  // the shard could not read whose frame it was
      }
      return;
    }
    default:
      OnProtocolError(absl::InternalError(absl::StrCat("unexpected frame of kind ", message.header().kind())));
  }
}

void ShardLink::OnProtocolError(const absl::Status& status) {
  hooks_.fatal(absl::Status(status.code(), absl::StrCat("shard ", options_.address, ": ", status.message())));
}

void ShardLink::OnCredit(const v1::ExchangeResponse& credit) {
  if (!AskForSharedMemory(credit)) Open(credit, nullptr);
}

bool ShardLink::AskForSharedMemory(const v1::ExchangeResponse& credit) {
  for (const v1::Ring& offer : credit.ring_offers()) {
    if (offer.kind() != v1::RING_KIND_MESSAGES || offer.device() != wire::HostIdentity()) continue;
    MutexLock lock(mu_);
    if (!memory_broken_.ok()) return false;
    if (state_ == StreamState::kOpening && !opening_.has_value()) {
      opening_ = credit;
      WriteRegionRequest(offer);
    }
    return true;
  }
  return false;
}

void ShardLink::OnRing(const v1::Ring& ring) {
  if (ring.kind() != v1::RING_KIND_MESSAGES) return path_.OnGranted(ring);
  {
    MutexLock lock(mu_);
    if (!opening_.has_value()) return;  // it has not been asked for
  }
  absl::StatusOr<std::unique_ptr<wire::SharedMemory>> memory = wire::SharedMemory::Open(ring.handle());
  OpenWith(memory.ok() ? *std::move(memory) : nullptr);
}

void ShardLink::OnRingRefused(const absl::Status& status) {
  if (!OpenWith(nullptr)) path_.OnRefused(status);
}

bool ShardLink::OpenWith(std::unique_ptr<wire::SharedMemory> memory) {
  std::optional<v1::ExchangeResponse> credit;
  {
    MutexLock lock(mu_);
    credit.swap(opening_);
  }
  if (credit.has_value()) Open(*credit, std::move(memory));
  return credit.has_value();
}

void ShardLink::Open(const v1::ExchangeResponse& credit, std::unique_ptr<wire::SharedMemory> memory) {
  const uint64_t first_order = hooks_.last_first_order == nullptr ? 0 : hooks_.last_first_order();
  MutexLock lock(mu_);
  if (state_ != StreamState::kOpening) return;
  if (memory != nullptr) stream_->UseSharedMemory(std::move(memory));
  state_ = StreamState::kOpen;
  broken_ = absl::OkStatus();
  backend_ = credit.backend();
  bundles_ = credit.takes_bundles();
  path_.OnStreamOpen(credit);
  changed_.notify_all();
  outbox_.ForgetVersionsBefore(first_order);
  backoff_ = kFirstBackoff;
  if (outbox_.StartStream(credit.credit_bytes(), credit.shard_generation()))
    outbox_.RetryRefusalsUntil(MonotonicNow() + options_.result_timeout);
  Pump();
}

void ShardLink::OnAck(const ContributionId& id, uint64_t epoch, uint64_t updates_lost) {
  if (updates_lost > 0) hooks_.updates_lost(id.layer, updates_lost);
  Outbox::Item item;  // freed after the lock is released
  MutexLock lock(mu_);
  if (epoch != epoch_) return;  // it began since MatchKey, and what it asks for again is not acknowledged by this
  item = outbox_.Acknowledge(id);
  if (item != nullptr && updates_lost > 0) outbox_.LowerBegun(id.layer, updates_lost);
  NotifyIfAcknowledged();
  Pump();
}

void ShardLink::OnResult(const ContributionId& id, const v1::ExchangeResponse& message,
                         const wire::ReceivedBytes& payload) {
  Outbox::Item item;
  {
    MutexLock lock(mu_);
    if (message.header().epoch() != epoch_) return;
    item = outbox_.Find(id);
    if (path_.OnLateAnswer(id, item, message.header().has_ring_offset())) return;
    if (taking_.contains(id)) return;  // it is here already
  }
  if (item == nullptr || item->result == nullptr) return;
  const v1::Outcome& outcome = message.outcome();
  const absl::StatusOr<Decision> decision = wire::DecodeDecision(outcome.decision(), "decision");
  Preconditioned answer = {decision.value_or(Decision::kSkip), outcome.factor_version(), outcome.inner_product(),
                           outcome.reason()};
  absl::StatusOr<bool> complete = true;
  if (!decision.ok()) {
    complete = decision.status();
  } else if (*decision != Decision::kSkip && item->abstain) {
    complete =
        absl::AbortedError(absl::StrCat("step ", id.step, " layer ", id.layer,
                                        ": this rank abstained, and an earlier process of it had not: go back to a "
                                        "checkpoint with all ranks, and join again"));
  } else if (*decision != Decision::kSkip && message.header().has_ring_offset()) {
    return TakeFromSlot(std::move(item), message, payload, std::move(answer));
  } else if (*decision != Decision::kSkip) {
    complete = PayloadPath::Receive(*item, message.header(), payload);
  }
  if (complete.ok() && !*complete) return;
  Answer(std::move(item), complete.status(), std::move(answer));
}

void ShardLink::TakeFromSlot(Outbox::Item item, const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload,
                             Preconditioned outcome) {
  {
    MutexLock lock(mu_);
    taking_.insert(item->id);
  }
  const Contribution& contribution = *item;
  auto answer = [this, item = std::move(item), outcome = std::move(outcome)](const absl::Status& taken) mutable {
    const ContributionId id = item->id;
    Answer(std::move(item), taken, std::move(outcome));  // releases the slot's memory before the outcome is known
    MutexLock lock(mu_);
    taking_.erase(id);
    changed_.notify_all();
  };
  PayloadPath::TakeFromSlot(contribution, message.header(), payload, std::move(answer));
}

void ShardLink::Answer(Outbox::Item item, const absl::Status& complete, Preconditioned outcome) {
  const std::shared_ptr<AnswerSink> result = item->result;
  bool keep = false;
  {
    MutexLock lock(mu_);
    keep = options_.keep_gradients && outbox_.keeps_gradients();
  }
  Outbox::Item kept = keep ? Outbox::CopyToKeep(*item) : nullptr;
  {
    MutexLock lock(mu_);
    // It may have expired meanwhile, and a new one with its id may have been submitted.
    if (outbox_.Holds(item)) outbox_.Finish(item->id, std::move(kept), outcome.factor_version);
    path_.GiveBack(*item);
    NotifyIfAcknowledged();
    Pump();
  }
  item.reset();  // the gradient's memory is released before the result is written over it
  if (complete.ok()) {
    result->Complete(std::move(outcome));
  } else {
    const absl::StatusCode code = absl::IsAborted(complete) ? complete.code() : absl::StatusCode::kInternal;
    result->Fail(absl::Status(code, absl::StrCat("shard ", options_.address, ": ", complete.message())));
  }
}

void ShardLink::OnRefused(const ContributionId& id, uint64_t epoch, const absl::Status& status) {
  const absl::Time now = MonotonicNow();
  Recovery recovery = Recovery::kRefused;
  Outbox::Item item;
  bool abstains = false;
  {
    MutexLock lock(mu_);
    if (epoch != epoch_) return;
    const Outbox::Item waiting = outbox_.Find(id);
    if (waiting == nullptr) {
      path_.OnLateAnswer(id, waiting, /*in_slot=*/false);
      return;
    }
    recovery = outbox_.RecoveryOf(id, status, now);
    if (recovery == Recovery::kRetryLater) outbox_.RetryAfter(id, now, RetryPause(options_.rank));
    if (recovery == Recovery::kRefreshEpoch) outbox_.Park(id);
    if (outbox_.CountsAsAbstention(id, status)) {
      abstains = true;
      item = outbox_.AbstainInstead(id);
      if (item->result == nullptr) hooks_.refused_statistics(status);
    } else if (recovery == Recovery::kRefused) {
      const bool counted = outbox_.WasCounted(id, status);
      item = outbox_.Remove(id);
      if (item->result == nullptr && !counted) hooks_.refused_statistics(status);
    }
    if (item != nullptr) path_.GiveBack(*item);
    NotifyIfAcknowledged();
    Pump();
  }
  // The shard will get the session again, or the session is closed: the coordinator knows which.
  if (GetErrorReason(status) == ErrorReason::kUnknownSession) hooks_.forgotten();
  if (recovery == Recovery::kRetryLater) hooks_.wake();
  if (recovery == Recovery::kRefreshEpoch) hooks_.stale_epoch(epoch);
  if (recovery == Recovery::kFatal) hooks_.fatal(status);
  if (abstains || item == nullptr || item->result == nullptr) return;
  const std::shared_ptr<AnswerSink> result = item->result;
  item.reset();
  result->Fail(status);
}

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

// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/shard_link.h"

#include <algorithm>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/channel.h"
#include "client/cpp/src/result_state.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/spec_codec.h"
#include "proto/wire/status_codec.h"

namespace precondor {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);
constexpr absl::Duration kLastBackoff = absl::Seconds(2);
constexpr absl::Duration kRetryPause = absl::Milliseconds(20);  // after the first refusal that will pass
constexpr absl::Duration kCloseTimeout = absl::Seconds(1);      // for a stream that ends in order
// Frames below this size wait in the transport for the one that follows at once: fewer system calls.
constexpr uint64_t kCoalesceBytes = 64 << 10;
constexpr size_t kBundledHeaderBytes = 160;  // more than any frame's header takes

// Ranks that were refused together do not come again together.
absl::Duration RetryPause(uint32_t rank) { return kRetryPause * (1 + rank % 16 / 32.0); }

const std::string& ExchangeMethod() {
  static const std::string* const kMethod = new std::string("/precondor.v1.PreconditionService/Exchange");
  return *kMethod;
}

// Ends of a stream that another attempt would meet again.
bool IsFinal(grpc::StatusCode code) {
  return code == grpc::StatusCode::UNIMPLEMENTED || code == grpc::StatusCode::INVALID_ARGUMENT ||
         code == grpc::StatusCode::UNAUTHENTICATED || code == grpc::StatusCode::PERMISSION_DENIED;
}

// What a RESULT answers; of a gradient it need not say so.
v1::FrameKind ResultOf(const v1::ExchangeResponse& message) {
  const v1::FrameKind kind = message.contribution();
  return kind == v1::FRAME_KIND_UNSPECIFIED ? v1::FRAME_KIND_GRADIENT : kind;
}

absl::string_view KindName(v1::FrameKind kind) {
  switch (kind) {
    case v1::FRAME_KIND_GRADIENT:
      return "gradient";
    case v1::FRAME_KIND_PULL:
      return "request for the step's factors";
    case v1::FRAME_KIND_FETCH:
      return "request for the factors";
    default:
      return "statistics";
  }
}

}  // namespace

class ShardLink::Channel {
 public:
  explicit Channel(const Options& options) : stub_(MakeChannel(options.address, *options.security)) {}
  grpc::GenericStub& stub() { return stub_; }

 private:
  grpc::GenericStub stub_;
};

// Carries events of one call to its link. Every operation is started under the link's lock while the read of the loop
// is outstanding, so that gRPC cannot report the end in between; OnDone is the last event. The link deletes it
// later on a thread of its own: a context holds its channel, and gRPC 1.51 dies when its last channel goes on one of
// gRPC's callback threads.
class ShardLink::Stream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Stream(ShardLink* link, grpc::GenericStub& stub) : link_(link) {
    stub.PrepareBidiStreamingCall(&context_, ExchangeMethod(), {}, this);
  }
  void Start() {
    StartRead(&in_);
    StartCall();
  }
  void Write(const grpc::ByteBuffer& frame, bool more) {
    out_ = frame;  // counts a reference
    grpc::WriteOptions options;
    if (more) options.set_buffer_hint();
    StartWrite(&out_, options);
  }
  void HalfClose() { StartWritesDone(); }
  void Cancel() { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) {
      link_->OnBroken();
      return;
    }
    link_->OnRead(in_);
    in_.Clear();
    StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    out_.Clear();  // it would keep the payload's memory borrowed until the next write
    link_->OnWriteDone(ok);
  }
  void OnDone(const grpc::Status& status) override { link_->OnStreamDone(status); }

  ShardLink* const link_;
  grpc::ClientContext context_;
  grpc::ByteBuffer in_;
  grpc::ByteBuffer out_;
};

ShardLink::ShardLink(Options options, Hooks hooks, TrafficCounters& traffic)
    : options_(std::move(options)),
      hooks_(std::move(hooks)),
      traffic_(traffic),
      backoff_(kFirstBackoff),
      epoch_(options_.epoch),
      outbox_(options_.may_lose_shard) {
  // Of a job that has gone on before: what others send again may hold old steps open.
  if (epoch_ > 1) outbox_.SettlesBy(MonotonicNow() + options_.result_timeout);
  if (!options_.plane.has_value()) return;
  WorkerCollectiveSession::Hooks hooks_of_plane;
  hooks_of_plane.ask = hooks_.ask_plane;
  hooks_of_plane.decline = hooks_.decline_plane;
  hooks_of_plane.answered = [this](Outbox::Item item, const wire::PlaneAnswer& answer,
                                   const wire::ReceivedBytes& values) {
    OnPlaneAnswer(std::move(item), answer, values);
  };
  hooks_of_plane.give_back = [this](const std::vector<ContributionId>& ids) { ToStream(ids); };
  plane_ = std::make_unique<WorkerCollectiveSession>(*options_.plane, std::move(hooks_of_plane));
  plane_->BeginEpoch(epoch_);
}

ShardLink::~ShardLink() {
  plane_.reset();
  {
    MutexLock lock(mu_);
    closing_ = true;
    if (state_ == StreamState::kOpen && outbox_.empty() && !writing_) {
      ring_ = nullptr;  // unmapped before the shard hears of the end
      expired_in_ring_.clear();
      stream_->HalfClose();
      changed_.wait_until(mu_, SteadyTime(MonotonicNow() + kCloseTimeout),
                          [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return state_ == StreamState::kNone; });
    }
  }
  Fail(absl::CancelledError(absl::StrCat("shard ", options_.address, ": the worker was destroyed")));
  MutexLock lock(mu_);
  changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return state_ == StreamState::kNone; });
  stream_.reset();
  channel_.reset();
}

absl::Status ShardLink::Submit(Outbox::Item item) {
  MutexLock lock(mu_);
  PRECONDOR_RETURN_IF_ERROR(failed_);
  if (item->ring != nullptr && item->ring != ring_) return absl::UnavailableError("the ring is gone");
  const bool by_plane = plane_ != nullptr && item->id.kind == v1::FRAME_KIND_GRADIENT;
  PRECONDOR_RETURN_IF_ERROR(outbox_.Add(item, by_plane));
  if (by_plane && !plane_->Offer(item)) outbox_.ToStream(item->id);
  Pump();
  return absl::OkStatus();
}

absl::Time ShardLink::Tick(absl::Time now) {
  std::vector<Outbox::Item> expired;
  absl::Time next;
  {
    MutexLock lock(mu_);
    expired = outbox_.TakeExpired(now);
    for (const Outbox::Item& item : expired) {
      if (item->result == nullptr) hooks_.refused_statistics(LateError(item->id));
      if (item->ring != nullptr && item->ring == ring_) expired_in_ring_[item->id] = item->ring;
    }
    NotifyIfAcknowledged();
    if (state_ == StreamState::kNone) stream_.reset();  // a call that has ended may still hold what it did not send
    if (!failed_.ok() && stream_ == nullptr) channel_.reset();  // and its connection what it did
    if (state_ == StreamState::kNone && !closing_ && !moving_ && failed_.ok() && connect_at_ <= now) Connect(now);
    if (state_ == StreamState::kOpening && opening_deadline_ <= now) CancelStream();
    Pump();
    next = outbox_.NextEvent(now);
    if (state_ == StreamState::kNone && !closing_ && failed_.ok()) next = std::min(next, connect_at_);
    if (state_ == StreamState::kOpening) next = std::min(next, opening_deadline_);
  }
  bool stuck = false;
  for (Outbox::Item& item : expired) {
    const std::shared_ptr<AnswerSink> result = item->result;
    if (result == nullptr) continue;
    const absl::Status late = LateError(item->id);
    item.reset();  // with it goes our hold on the gradient's memory
    result->Fail(late);
    stuck |= !result->ready();
  }
  if (stuck) {
    // The transport still holds the caller's memory: only the end of the connection gives it back.
    MutexLock lock(mu_);
    renew_channel_ = true;
    CancelStream();
  }
  return next;
}

absl::Status ShardLink::LateError(const ContributionId& id) const {
  return absl::DeadlineExceededError(
      absl::StrCat("shard ", options_.address, ": session ", options_.session, " step ", id.step, " layer ", id.layer,
                   ": ", KindName(id.kind), " not answered within ", absl::FormatDuration(options_.result_timeout)));
}

void ShardLink::Connect(absl::Time now) {
  if (channel_ == nullptr || renew_channel_) channel_ = std::make_unique<Channel>(options_);
  renew_channel_ = false;
  ahead_.reset();
  writing_ = false;
  state_ = StreamState::kOpening;
  opening_deadline_ = now + options_.connect_timeout;
  stream_ = std::make_unique<Stream>(this, channel_->stub());
  stream_->Start();
}

void ShardLink::CancelStream() {
  if (state_ == StreamState::kNone) return;
  state_ = StreamState::kClosing;
  stream_->Cancel();
}

void ShardLink::ChangeEpoch(uint64_t epoch) {
  {
    MutexLock lock(mu_);
    if (epoch != epoch_) outbox_.Reopen();
    epoch_ = epoch;
    if (plane_ != nullptr) {
      for (const ContributionId& id : plane_->BeginEpoch(epoch)) outbox_.ToStream(id);
    }
    backoff_ = kFirstBackoff;
    CancelStream();
  }
  hooks_.wake();
}

Outbox::Moved ShardLink::TakeLayers(const std::set<uint32_t>& layers) {
  MutexLock lock(mu_);
  moving_ = true;
  CancelStream();
  changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return state_ == StreamState::kNone; });
  stream_.reset();
  moving_ = false;
  Outbox::Moved moved = outbox_.TakeLayers(layers);
  NotifyIfAcknowledged();
  return moved;
}

void ShardLink::Adopt(Outbox::Moved moved) {
  {
    MutexLock lock(mu_);
    outbox_.Adopt(std::move(moved));
    outbox_.SettlesBy(MonotonicNow() + options_.result_timeout);
    Pump();
  }
  hooks_.wake();
}

std::optional<uint64_t> ShardLink::answered_through() const {
  MutexLock lock(mu_);
  return outbox_.answered_through();
}

void ShardLink::Fail(const absl::Status& status) {
  std::vector<Outbox::Item> items;
  {
    MutexLock lock(mu_);
    if (failed_.ok()) failed_ = status;
    items = outbox_.TakeAll();
    ahead_.reset();
    CancelStream();
    changed_.notify_all();
  }
  if (plane_ != nullptr) plane_->Leave();
  for (const Outbox::Item& item : items) {
    if (item->result != nullptr) item->result->Fail(status);
  }
}

bool ShardLink::WaitAcknowledged(absl::Time deadline) {
  MutexLock lock(mu_);
  return changed_.wait_until(mu_, SteadyTime(deadline),
                             [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return outbox_.unacknowledged() == 0; });
}

size_t ShardLink::unacknowledged() const {
  MutexLock lock(mu_);
  return outbox_.unacknowledged();
}

void ShardLink::NotifyIfAcknowledged() {
  if (outbox_.unacknowledged() == 0) changed_.notify_all();
}

// --- writing ------------------------------------------------------------------------------------------------------

std::optional<Outbox::Frame> ShardLink::NextFrame(absl::Time now) {
  if (!ahead_.has_value()) return outbox_.Next(now);
  return std::exchange(ahead_, std::nullopt);
}

void ShardLink::Pump() {
  if (state_ != StreamState::kOpen || writing_) return;
  if (ring_state_ == RingState::kToAsk) return WriteRingRequest();
  const absl::Time now = MonotonicNow();
  std::optional<Outbox::Frame> frame = NextFrame(now);
  if (!frame.has_value()) return;
  std::vector<Outbox::Frame> frames = {*std::move(frame)};
  if (frames.front().chunk.size < kCoalesceBytes) {
    // What waits together travels together; a frame that waits in the transport for its successor needs one that is
    // certain to come.
    size_t bytes = BundledBytes(frames.front());
    while ((ahead_ = NextFrame(now)).has_value() && (bytes += BundledBytes(*ahead_)) <= wire::kMaxBundleBytes) {
      frames.push_back(*std::exchange(ahead_, std::nullopt));
    }
  }
  WriteFrames(frames, ahead_.has_value());
}

size_t ShardLink::BundledBytes(const Outbox::Frame& frame) {
  const bool whole = frame.chunk.size == frame.item->payload.size();
  return whole && frame.chunk.size < kCoalesceBytes ? frame.chunk.size + kBundledHeaderBytes
                                                    : wire::kMaxBundleBytes + 1;
}

void ShardLink::WriteFrames(const std::vector<Outbox::Frame>& frames, bool more) {
  v1::ExchangeRequest request;
  std::vector<wire::PayloadPart> parts;
  int64_t payload_bytes = 0;
  for (const Outbox::Frame& frame : frames) {
    const Contribution& item = *frame.item;
    const uint8_t* data = item.payload.data() + frame.chunk.offset;
    if (frames.size() > 1) {
      v1::ExchangeRequest* part = request.add_bundle();
      *part->mutable_header() = MakeHeader(frame);
      if (frame.chunk.size > 0) part->set_payload(data, frame.chunk.size);
    } else {
      *request.mutable_header() = MakeHeader(frame);
      if (frame.chunk.size > 0) parts.push_back({data, frame.chunk.size, item.payload_owner});
    }
    const int64_t bytes = static_cast<int64_t>(frame.chunk.size);
    auto& counter = item.id.kind == v1::FRAME_KIND_GRADIENT ? traffic_.gradient_bytes : traffic_.statistics_bytes;
    counter.fetch_add(bytes, std::memory_order_relaxed);
    payload_bytes += bytes;
  }
  absl::StatusOr<grpc::ByteBuffer> buffer = wire::EncodeFrame(request, parts);
  PRECONDOR_CHECK(buffer.ok());  // a chunk or a bundle is far below the limit of a message
  traffic_.overhead_bytes.fetch_add(static_cast<int64_t>(buffer->Length()) - payload_bytes, std::memory_order_relaxed);
  writing_ = true;
  stream_->Write(*std::move(buffer), more);
}

void ShardLink::WriteRingRequest() {
  v1::ExchangeRequest request;
  request.mutable_header()->set_session_id(options_.session_id);
  request.mutable_header()->set_kind(v1::FRAME_KIND_RING);
  *request.mutable_ring() = ring_request_;
  absl::StatusOr<grpc::ByteBuffer> buffer = wire::EncodeFrame(request, {});
  PRECONDOR_CHECK(buffer.ok());
  ring_state_ = RingState::kAsked;
  writing_ = true;
  stream_->Write(*std::move(buffer), /*more=*/false);
}

v1::FrameHeader ShardLink::MakeHeader(const Outbox::Frame& frame) const {
  const Contribution& item = *frame.item;
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
  header.set_chunk_offset(frame.chunk.offset);
  header.set_payload_bytes(item.ring == nullptr ? item.payload.size() : item.ring_bytes);
  if (item.ring != nullptr) header.set_ring_offset(item.ring_offset);
  header.set_factor_version(item.factor_version);
  return header;
}

void ShardLink::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (ok) Pump();  // otherwise the read fails too, and the stream ends
}

// --- reading ------------------------------------------------------------------------------------------------------

std::optional<ContributionId> ShardLink::MatchKey(const v1::FrameHeader& header, v1::FrameKind kind) const {
  MutexLock lock(mu_);
  if (header.session_id() != options_.session_id || header.epoch() != epoch_) return std::nullopt;
  return ContributionId{kind, header.step(), header.layer()};
}

void ShardLink::OnRead(const grpc::ByteBuffer& buffer) {
  absl::StatusOr<wire::Received<v1::ExchangeResponse>> frame = wire::DecodeResponse(buffer);
  if (!frame.ok()) {
    OnProtocolError(frame.status());
    return;
  }
  const int64_t payload_bytes = static_cast<int64_t>(frame->payload.size());
  traffic_.result_bytes.fetch_add(payload_bytes, std::memory_order_relaxed);
  traffic_.overhead_bytes.fetch_add(static_cast<int64_t>(buffer.Length()) - payload_bytes, std::memory_order_relaxed);
  if (frame->message.bundle_size() == 0) return OnFrame(frame->message, frame->payload);
  for (const v1::ExchangeResponse& part : frame->message.bundle()) OnFrame(part, {});
}

void ShardLink::OnFrame(const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload) {
  switch (message.header().kind()) {
    case v1::FRAME_KIND_CREDIT:
      OnCredit(message);
      return;
    case v1::FRAME_KIND_RING:
      OnRing(message.ring());
      return;
    case v1::FRAME_KIND_ACK:
      if (const auto id = MatchKey(message.header(), message.contribution())) OnAck(*id);
      return;
    case v1::FRAME_KIND_RESULT:
      if (const auto id = MatchKey(message.header(), ResultOf(message))) OnResult(*id, message, payload);
      return;
    case v1::FRAME_KIND_ERROR: {
      const absl::Status status = wire::FromErrorDetail(message.error());
      if (message.contribution() == v1::FRAME_KIND_RING) return OnRingRefused(status);
      if (const auto id = MatchKey(message.header(), message.contribution())) {
        OnRefused(*id, status);
      } else if (message.header().session_id() != options_.session_id) {
        OnProtocolError(status);  // the shard could not even read whose frame it was
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
  const uint64_t let_go_before = hooks_.let_go_before == nullptr ? 0 : hooks_.let_go_before();
  MutexLock lock(mu_);
  if (state_ != StreamState::kOpening) return;
  state_ = StreamState::kOpen;
  ring_overdue_ = false;
  ring_offers_.assign(credit.ring_offers().begin(), credit.ring_offers().end());
  changed_.notify_all();
  outbox_.LetGoBefore(let_go_before);
  backoff_ = kFirstBackoff;
  if (outbox_.StartStream(credit.credit_bytes(), credit.shard_generation()))
    outbox_.SettlesBy(MonotonicNow() + options_.result_timeout);
  Pump();
}

void ShardLink::OnAck(const ContributionId& id) {
  Outbox::Item item;  // freed after the lock
  MutexLock lock(mu_);
  item = outbox_.Acknowledge(id);
  NotifyIfAcknowledged();
  Pump();
}

absl::StatusOr<bool> ShardLink::TakeResult(const Contribution& item, const v1::FrameHeader& header,
                                           const wire::ReceivedBytes& payload) {
  if (header.has_ring_offset()) {
    const bool expected = item.ring != nullptr && header.ring_offset() == item.ring_offset &&
                          header.payload_bytes() == item.ring_bytes && payload.size() == 0;
    if (!expected) return absl::InternalError("result: expected it where its gradient lay, got another place");
    PRECONDOR_RETURN_IF_ERROR(item.result->TakeFromRing(item.ring->at(item.ring_offset)));
    return true;
  }
  if (header.chunk_offset() == 0) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<wire::TensorFormat> tensors,
                               wire::DecodeTensorHeaders(header.tensors()));
    PRECONDOR_RETURN_IF_ERROR(item.result->Begin(tensors, header.payload_bytes()));
  }
  PRECONDOR_RETURN_IF_ERROR(item.result->Append(header.chunk_offset(), payload));
  return item.result->HasAllBytes();
}

void ShardLink::OnResult(const ContributionId& id, const v1::ExchangeResponse& message,
                         const wire::ReceivedBytes& payload) {
  Outbox::Item item;
  {
    MutexLock lock(mu_);
    item = outbox_.Find(id);
    if (OnAnswerOfExpired(id, item, message.header().has_ring_offset())) return;
  }
  if (item == nullptr || item->result == nullptr) return;
  const v1::Outcome& outcome = message.outcome();
  const absl::StatusOr<Decision> decision = wire::DecodeDecision(outcome.decision(), "decision");
  absl::StatusOr<bool> complete = true;
  if (!decision.ok()) {
    complete = decision.status();
  } else if (*decision != Decision::kSkip) {
    complete = TakeResult(*item, message.header(), payload);
  }
  if (complete.ok() && !*complete) return;
  Answer(std::move(item), complete.status(),
         {decision.value_or(Decision::kSkip), outcome.factor_version(), outcome.inner_product(), outcome.reason()});
}

void ShardLink::Answer(Outbox::Item item, const absl::Status& complete, Preconditioned outcome) {
  const std::shared_ptr<AnswerSink> result = item->result;
  bool keep = false;
  {
    MutexLock lock(mu_);
    keep = options_.keep_gradients && outbox_.keeps_gradients();
  }
  Outbox::Item kept = keep ? Outbox::Kept(*item) : nullptr;
  {
    MutexLock lock(mu_);
    // It may have expired meanwhile, and another have come.
    if (outbox_.Holds(item)) outbox_.Finish(item->id, std::move(kept), outcome.factor_version);
    GiveSlotBack(*item);
    NotifyIfAcknowledged();
    Pump();
  }
  item.reset();  // the gradient's memory is released before the result is written over it
  if (complete.ok()) {
    result->Complete(std::move(outcome));
  } else {
    result->Fail(absl::InternalError(absl::StrCat("shard ", options_.address, ": ", complete.message())));
  }
}

void ShardLink::OnPlaneAnswer(Outbox::Item item, const wire::PlaneAnswer& answer, const wire::ReceivedBytes& values) {
  const auto sent = static_cast<int64_t>(item->payload.size());
  const auto received = static_cast<int64_t>(values.size());
  traffic_.gradient_bytes.fetch_add(sent, std::memory_order_relaxed);
  traffic_.result_bytes.fetch_add(received, std::memory_order_relaxed);
  traffic_.plane_bytes.fetch_add(sent + received, std::memory_order_relaxed);
  absl::Status complete;
  if (answer.decision != Decision::kSkip && item->tensors.size() != 1) {
    complete = absl::InternalError("expected SKIP for an abstention, got an answer");
  } else if (answer.decision != Decision::kSkip) {
    const wire::TensorFormat format = {.dtype = DType::kF32,
                                       .dims = {item->tensors[0].dims().begin(), item->tensors[0].dims().end()}};
    complete = item->result->Begin({format}, values.size());
    if (complete.ok()) complete = item->result->Append(0, values);
  }
  Answer(std::move(item), complete, {answer.decision, answer.factor_version, answer.inner_product, answer.reason});
}

void ShardLink::ToStream(const std::vector<ContributionId>& ids) {
  MutexLock lock(mu_);
  for (const ContributionId& id : ids) outbox_.ToStream(id);
  Pump();
}

void ShardLink::OnRefused(const ContributionId& id, const absl::Status& status) {
  const absl::Time now = MonotonicNow();
  Recovery recovery = Recovery::kRefused;
  Outbox::Item item;
  uint64_t epoch = 0;
  bool abstains = false;
  {
    MutexLock lock(mu_);
    const Outbox::Item waiting = outbox_.Find(id);
    if (waiting == nullptr) {
      OnAnswerOfExpired(id, waiting, false);
      return;
    }
    epoch = epoch_;
    recovery = outbox_.RecoveryOf(status, now);
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
    if (item != nullptr) GiveSlotBack(*item);
    NotifyIfAcknowledged();
    Pump();
  }
  // It gets the session again, or the session is closed: the coordinator knows.
  if (GetErrorReason(status) == ErrorReason::kUnknownSession) hooks_.forgotten();
  if (recovery == Recovery::kRetryLater) hooks_.wake();
  if (recovery == Recovery::kRefreshEpoch) hooks_.stale_epoch(epoch);
  if (recovery == Recovery::kFatal) hooks_.fatal(status);
  if (abstains || item == nullptr || item->result == nullptr) return;
  const std::shared_ptr<AnswerSink> result = item->result;
  item.reset();
  result->Fail(status);
}

// --- the end of a stream -------------------------------------------------------------------------------------------

void ShardLink::OnBroken() {
  MutexLock lock(mu_);
  state_ = StreamState::kClosing;
}

void ShardLink::OnStreamDone(const grpc::Status& status) {
  {
    MutexLock lock(mu_);
    state_ = StreamState::kClosing;
    ahead_.reset();
    outbox_.StopStream();
    for (const Outbox::Item& item : outbox_.Items()) {
      if (item->result != nullptr) item->result->Restart();
    }
    connect_at_ = MonotonicNow() + backoff_;
    backoff_ = std::min(backoff_ * 2, kLastBackoff);
    if (!closing_ && failed_.ok()) traffic_.reconnects.fetch_add(1, std::memory_order_relaxed);
  }
  MoveOutOfRing();
  if (IsFinal(status.error_code())) OnProtocolError(wire::FromGrpcStatus(status));
  // Last, and wake under the lock, since the destructor waits for it.
  MutexLock lock(mu_);
  state_ = StreamState::kNone;
  changed_.notify_all();
  hooks_.wake();
}

}  // namespace precondor

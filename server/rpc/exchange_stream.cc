// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/exchange_stream.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/status_codec.h"
#include "server/core/executors/thread_pool.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {
namespace {

// Whether `host` is the text of an address of this host. In the network namespace of this process, that is.
bool IsOwnAddress(const std::string& host) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> frees(list, &freeifaddrs);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    const void* address = nullptr;
    if (family == AF_INET) address = &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
    if (family == AF_INET6) address = &reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
    char text[INET6_ADDRSTRLEN];
    if (address != nullptr && inet_ntop(family, address, text, sizeof(text)) != nullptr && host == text) return true;
  }
  return false;
}

// The error of a client that sends by gRPC and through shared memory.
absl::Status OnOneWayAlone() {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                        "expected all messages by gRPC or all through shared memory, got both");
}

// Returns a callback that notifies `span`, if not null, and then calls `answer`.
ResultFn Traced(ResultFn answer, std::shared_ptr<StepSpan> span) {
  if (span == nullptr) return answer;
  return [answer = std::move(answer), span = std::move(span)](const absl::StatusOr<GradientResult>& result) {
    span->OnAnswer(result);
    answer(result);
  };
}

}  // namespace

// Peers are fd:NUMBER for Unix sockets, which the server accepts itself, ipv4:A.B.C.D:PORT and ipv6:%5BADDRESS%5D:PORT.
bool SharedMemoryLimit::MayOffer(const std::string& peer) const {
  if (most_bytes_ < kBytes || wire::HostIdentity().empty()) return false;
  if (absl::StartsWith(peer, "fd:") || absl::StartsWith(peer, "unix:") || absl::StartsWith(peer, "ipv4:127.")) {
    return true;
  }
  std::string host = peer.substr(peer.find(':') + 1);
  host = host.substr(0, host.rfind(':'));
  if (absl::StartsWith(host, "%5B")) host = host.substr(3, host.rfind("%5D") - 3);
  if (absl::StartsWith(host, "[")) host = host.substr(1, host.rfind(']') - 1);
  return IsOwnAddress(host);
}

absl::StatusOr<SharedMemoryLimit::Hold> SharedMemoryLimit::Take() {
  Hold hold(this);
  const int64_t bytes = bytes_.fetch_add(kBytes) + kBytes;
  if (bytes <= most_bytes_) return hold;
  return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                        absl::StrCat("shared memory: expected at most ", most_bytes_,
                                     " bytes for all streams (shared_memory_bytes), got ", bytes));
}

ExchangeStream::ExchangeStream(ShardDataPlane& shard, const std::string& backend, uint64_t credit_bytes,
                               OpenPayloads& open_payloads, uint64_t shard_generation, SharedRegions* regions,
                               SharedMemoryLimit* shared_memory, const ControlRunner& runner,
                               TransferObserver& observer, const std::optional<TraceContext>& caller)
    : shard_(shard),
      state_generation_(shard.state_generation()),
      clock_(runner.clock()),
      observer_(observer),
      recorder_(runner.recorder()),
      start_(clock_.Now()),
      open_payloads_(open_payloads),
      shared_memory_(shared_memory),
      queue_(std::make_shared<FrameQueue>(
          FrameQueue::Events{
              .write = [this](const grpc::ByteBuffer* message, bool more) { return Write(message, more); },
              .resume = [this] { Resume(); },
              .drained = [this] { Finish(grpc::Status::OK); },
              .now = [&clock = clock_] { return clock.Now(); },
              .replied = [&observer](absl::Duration took) { observer.OnReply(took); }},
          credit_bytes)),
      path_(regions, credit_bytes, queue_, observer),
      tracer_(runner.tracer()) {
  if (tracer_ != nullptr) BeginTrace(*tracer_, caller);
  // A client repeats its frames in order after it connects. The stream must take all of them from the first one on, or
  // end: if it refused only the first frames, the shard would get the others out of order.
  if (const absl::Status serving = shard.CheckServing(); !serving.ok()) {
    End(serving);
    return;
  }
  v1::ExchangeResponse credit;
  credit.mutable_header()->set_kind(v1::FRAME_KIND_CREDIT);
  credit.set_credit_bytes(credit_bytes);
  credit.set_backend(backend);
  credit.set_takes_bundles(true);
  if (shard_generation != 0) credit.set_shard_generation(shard_generation + state_generation_);
  path_.Offer(credit);
  if (shared_memory_ != nullptr) {
    v1::Ring& offer = *credit.add_ring_offers();
    offer.set_kind(v1::RING_KIND_MESSAGES);
    offer.set_device(wire::HostIdentity());
    offer.set_bytes(wire::SharedMemory::kBytes);
  }
  queue_->Push(std::move(credit));
  StartRead(&incoming_);
}

void ExchangeStream::OnReadDone(bool ok) {
  if (!ok) return queue_->HalfClose();
  absl::Status status;
  bool declines = false;
  {
    MutexLock lock(reading_);
    declines = shared_ != nullptr && !uses_shared_.load();
    declined_ |= declines;
    status = uses_shared_.load() ? OnOneWayAlone() : Handle(wire::DecodeRequest(incoming_));
  }
  if (declines) {  // the client could not map the memory
    shared_ = nullptr;
    shared_hold_ = nullptr;
  }
  incoming_.Clear();
  if (!status.ok()) return End(status);
  if (!queue_->PauseWhenFull()) StartRead(&incoming_);
}

bool ExchangeStream::HandleShared(absl::string_view message) {
  if (ended_.load()) return false;
  absl::Status status;
  {
    MutexLock lock(reading_);
    uses_shared_.store(!declined_);
    status = declined_ ? OnOneWayAlone() : Handle(wire::DecodeContiguousRequest(message));
  }
  if (!status.ok()) End(status);
  return status.ok() && !queue_->PauseWhenFull();
}

bool ExchangeStream::Write(const grpc::ByteBuffer* message, bool more) {
  if (uses_shared_.load()) return shared_->Write(*message);
  grpc::WriteOptions options;
  if (more) options.set_buffer_hint();  // lets gRPC send small messages together
  StartWrite(message, options);
  return false;
}

void ExchangeStream::Resume() {
  if (uses_shared_.load()) return shared_->Resume();
  StartRead(&incoming_);
}

void ExchangeStream::OnWriteDone(bool ok) {
  if (ok) return queue_->Written();
  End(absl::CancelledError("the peer is gone"));
}

void ExchangeStream::OnCancel() {
  cancelled_.store(true, std::memory_order_relaxed);
  End(absl::CancelledError("the peer is gone"));
}

void ExchangeStream::OnDone() {
  queue_->Close();
  shared_ = nullptr;
  // A client that ends a stream in order has unmapped its region. A lost connection also ends the reads, but then gRPC
  // reports a cancellation.
  if (code_ == absl::StatusCode::kOk && !cancelled_.load(std::memory_order_relaxed)) path_.NoteUnmapped();
  recorder_("PreconditionService/Exchange", code_, clock_.Now() - start_);
  if (tracer_ != nullptr) {
    spans_.reset();
    span_.end = clock_.Now();
    if (code_ != absl::StatusCode::kOk) span_.status = absl::Status(code_, absl::StatusCodeToString(code_));
    tracer_->Record(std::move(span_));
  }
  delete this;
}

void ExchangeStream::End(const absl::Status& status) {
  ended_.store(true);
  if (!queue_->Close()) return;
  code_ = status.code();
  Finish(wire::ToGrpcStatus(status));
}

void ExchangeStream::BeginTrace(trace::Tracer& tracer, const std::optional<TraceContext>& caller) {
  span_.context = caller.has_value() ? *caller : NewTrace();
  if (caller.has_value()) {
    span_.parent_span_id = caller->span_id;
    span_.context.span_id = NewSpanId();
  }
  span_.name = SpanName("PreconditionService/Exchange");
  span_.kind = trace::SpanKind::kServer;
  span_.start = start_;
  spans_ = std::make_unique<StepSpans>(tracer, span_.context);
}

absl::Status ExchangeStream::Handle(absl::StatusOr<wire::Received<v1::ExchangeRequest>> received) {
  PRECONDOR_ASSIGN_OR_RETURN(wire::Received<v1::ExchangeRequest> frame, std::move(received));
  if (frame.message.bundle_size() == 0) {
    PRECONDOR_RETURN_IF_ERROR(CheckGeneration(frame.message));
    HandleFrame(frame.message, frame.payload);
    begun_ = true;
    return ring_fault_;
  }
  begun_ = true;
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<wire::ReceivedBytes> payloads, wire::TakeBundledPayloads(frame));
  const v1::ExchangeRequest& message = frame.message;
  for (const v1::ExchangeRequest& part : message.bundle()) PRECONDOR_RETURN_IF_ERROR(CheckGeneration(part));
  if (message.bundled_bytes_size() > 0) queue_->AllowBundles();
  queue_->Hold();
  {
    TaskBatch wakes_together;
    for (int first = 0; first < message.bundle_size();) first += HandleFirst(message, payloads, first);
  }
  queue_->Release();
  return ring_fault_;
}

int ExchangeStream::HandleFirst(const v1::ExchangeRequest& bundle, absl::Span<const wire::ReceivedBytes> payloads,
                                int first) {
  // A layer's next gradient is admitted when the layer has the one before.
  std::vector<SlotFrame> in_slots;
  std::set<uint32_t> layers;
  for (int i = first; i < bundle.bundle_size(); ++i) {
    const v1::FrameHeader& header = bundle.bundle(i).header();
    if (!header.has_ring_offset() || !layers.insert(header.layer()).second) break;
    in_slots.push_back({&header, payloads[i]});
  }
  if (in_slots.size() > 1) {
    SubmitInRing(in_slots);
    return static_cast<int>(in_slots.size());
  }
  HandleFrame(bundle.bundle(first), payloads[first]);
  return 1;
}

absl::Status ExchangeStream::CheckGeneration(const v1::ExchangeRequest& frame) const {
  return shard_.CheckGeneration(frame.header().session_id(), state_generation_);
}

void ExchangeStream::HandleFrame(const v1::ExchangeRequest& message, const wire::ReceivedBytes& payload) {
  const v1::FrameHeader& header = message.header();
  const absl::Time now = clock_.Now();
  const SessionCaller& caller = CallerOf(header);  // first: the secret in a refused frame counts too
  if (header.kind() == v1::FRAME_KIND_RING) return OpenRing(message);
  if (header.has_ring_offset()) return SubmitInRing({{&header, payload}});
  if (header.kind() == v1::FRAME_KIND_RESUME) {
    const absl::StatusOr<uint64_t> lost =
        shard_.Resume({.key = DecodeKey(header),
                       .factor_version = header.factor_version(),
                       .next_step = header.has_next_step() ? header.next_step() : header.step(),
                       .begins = header.abstain()},
                      caller);
    return lost.ok() ? PushAck(*queue_, header, /*duplicate=*/false, *lost) : PushError(*queue_, header, lost.status());
  }
  if (header.kind() == v1::FRAME_KIND_FETCH) {
    return Fetch(header);
  }
  std::optional<Incoming> whole;  // set if this frame is the contribution's first and is admitted
  const auto admit = [&](const v1::FrameHeader& first) -> absl::StatusOr<Payload> {
    PRECONDOR_ASSIGN_OR_RETURN(ContributionHeader decoded, DecodeHeader(first));
    PRECONDOR_ASSIGN_OR_RETURN(AdmittedContribution admitted,
                               shard_.AdmitContribution(std::move(decoded), first.payload_bytes(), caller));
    OpenPayloads::Hold hold;
    if (payload.size() < first.payload_bytes()) {
      absl::StatusOr<OpenPayloads::Hold> begun = open_payloads_.Begin(admitted.header().key, first.payload_bytes());
      if (!begun.ok()) {
        shard_.CountRefusal(admitted.header(), begun.status());
        return begun.status();
      }
      hold = *std::move(begun);
    }
    whole = Incoming{std::move(admitted), now, std::move(hold)};
    return whole->admitted.MakePayload();
  };
  observer_.OnReceived(TransferPath::kStream,
                       header.kind() == v1::FRAME_KIND_STATISTICS ? TransferKind::kStatistics : TransferKind::kGradient,
                       static_cast<int64_t>(payload.size()));
  absl::StatusOr<wire::ChunkAssembler::Result> result = path_.AddInline(header, payload, admit);
  if (result.ok() && result->progress == wire::ChunkAssembler::Progress::kPartial) {
    if (whole.has_value()) open_.insert_or_assign(KeyOf(header), *std::move(whole));
    open_.find(KeyOf(header))->second.admitted.Inspect(result->received);
    return;
  }
  if (!whole.has_value()) {  // the contribution began with an earlier frame, or it was refused and has no entry
    auto opened = open_.extract(KeyOf(header));
    if (!opened.empty()) whole = std::move(opened.mapped());
  }
  if (whole.has_value()) whole->hold.reset();  // before the answer: after it the client can send more
  if (!result.ok()) return PushError(*queue_, header, result.status());
  if (result->progress != wire::ChunkAssembler::Progress::kComplete) return;
  const bool gradient = whole->admitted.header().kind != ContributionKind::kStatistics;
  Submit(std::move(whole->admitted), result->header, std::move(result->payload), whole->began,
         gradient ? path_.AnswerInline(result->header) : ResultFn());
}

const SessionCaller& ExchangeStream::CallerOf(const v1::FrameHeader& header) {
  if (callers_.size() >= kMaxCallers && !callers_.contains(header.session_id())) callers_.clear();
  SessionCaller& caller = callers_.try_emplace(header.session_id(), SessionCaller::Showing("")).first->second;
  caller.stream_generation = state_generation_;
  if (!header.secret().empty()) caller.secret = header.secret().substr(0, kLongestSecret);
  return caller;
}

ExchangeStream::IncomingKey ExchangeStream::KeyOf(const v1::FrameHeader& header) {
  return {header.session_id(),
          header.epoch(),
          header.step(),
          header.layer(),
          header.rank(),
          header.incarnation(),
          static_cast<int>(header.kind())};
}

// A FETCH has no payload, so credit does not bound its answers, which hold a layer's factors. AddNamedPendingAnswer
// bounds them.
void ExchangeStream::Fetch(const v1::FrameHeader& header) {
  const ContributionKey key = DecodeKey(header);
  const std::string name = absl::StrCat(key.session_id, "/", key.layer);
  if (!queue_->AddNamedPendingAnswer(name)) {
    return PushError(*queue_, header,
                     ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                                    absl::StrCat("FETCH of layer ", key.layer,
                                                 ": expected one after the other, and answers read, but an earlier one "
                                                 "of the layer is not answered or the stream's answers wait")));
  }
  shard_.Fetch(
      key,
      [queue = queue_, &observer = observer_, header, name](const absl::StatusOr<GradientResult>& result) {
        PayloadPath::Push(*queue, observer, header, result);
        queue->MarkAnsweredOnce(name);
      },
      CallerOf(header));
}

void ExchangeStream::OpenRing(const v1::ExchangeRequest& request) {
  absl::StatusOr<v1::Ring> granted =
      request.ring().kind() == v1::RING_KIND_MESSAGES ? OpenSharedMemory() : path_.Open(request.ring());
  if (!granted.ok()) return PushError(*queue_, request.header(), granted.status());
  v1::ExchangeResponse response;
  *response.mutable_header() = AnswerHeader(request.header(), v1::FRAME_KIND_RING);
  *response.mutable_ring() = *std::move(granted);
  queue_->Push(std::move(response));
}

absl::StatusOr<v1::Ring> ExchangeStream::OpenSharedMemory() {
  if (shared_memory_ == nullptr || begun_) {
    return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kMalformed,
                          begun_ ? "ring: expected a request for shared memory before anything else"
                                 : "ring: expected no request for shared memory, since none was offered");
  }
  PRECONDOR_ASSIGN_OR_RETURN(SharedMemoryLimit::Hold hold, shared_memory_->Take());
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<wire::SharedMemory> memory, wire::SharedMemory::Create());
  v1::Ring granted;
  granted.set_kind(v1::RING_KIND_MESSAGES);
  granted.set_device(wire::HostIdentity());
  granted.set_bytes(wire::SharedMemory::kBytes);
  granted.set_handle(memory->handle());
  PRECONDOR_ASSIGN_OR_RETURN(
      shared_,
      wire::SharedChannel::Start(
          wire::SharedChannel::Side::kServer, std::move(memory),
          wire::SharedChannel::Events{.read = [this](absl::string_view message) { return HandleShared(message); },
                                      .written = [this] { queue_->Written(); },
                                      .broken = [this](const absl::Status& status) { End(status); }}));
  shared_hold_ = std::move(hold);
  return granted;
}

absl::StatusOr<ExchangeStream::SlotContribution> ExchangeStream::TakeFromRing(const v1::FrameHeader& header,
                                                                              const wire::ReceivedBytes& payload) {
  const SessionCaller& caller = CallerOf(header);  // first: the secret in a refused frame counts too
  PRECONDOR_ASSIGN_OR_RETURN(ContributionHeader decoded, DecodeHeader(header));
  // A placeholder that marks the payload as being on the device: the header must be valid before the ring is read.
  decoded.on_device = std::make_shared<DevicePayload>();
  PRECONDOR_ASSIGN_OR_RETURN(AdmittedContribution admitted,
                             shard_.AdmitContribution(std::move(decoded), header.payload_bytes(), caller));
  const std::vector<int64_t>& dims = admitted.header().tensors[0].dims;
  absl::StatusOr<StreamRegion::Gradient> gradient = path_.TakeSlot(header, payload, dims[0], dims[1]);
  if (gradient.ok()) {
    return SlotContribution{&header, std::move(admitted), *std::move(gradient)};
  }
  const absl::Status status = gradient.status();
  shard_.CountRefusal(admitted.header(), status);
  return status;
}

void ExchangeStream::SubmitInRing(absl::Span<const SlotFrame> frames) {
  const absl::Time began = clock_.Now();
  std::vector<SlotContribution> taken;
  std::vector<StreamRegion::Gradient> gradients;
  for (const SlotFrame& frame : frames) {
    absl::StatusOr<SlotContribution> one = TakeFromRing(*frame.header, frame.payload);
    if (!one.ok()) {
      PushError(*queue_, *frame.header, one.status());
      continue;
    }
    gradients.push_back(one->gradient);
    taken.push_back(*std::move(one));
  }
  const absl::Status inspected = path_.Inspect(gradients);
  for (SlotContribution& one : taken) {
    if (inspected.ok()) {
      SubmitInspected(std::move(one), began);
    } else {
      shard_.CountRefusal(one.admitted.header(), inspected);
    }
  }
  if (!inspected.ok()) ring_fault_ = absl::UnavailableError(absl::StrCat("ring: ", inspected.message()));
}

void ExchangeStream::SubmitInspected(SlotContribution taken, absl::Time began) {
  const v1::FrameHeader& header = *taken.header;
  taken.admitted.PlaceOnDevice(taken.gradient.payload);
  observer_.OnReceived(TransferPath::kRing, TransferKind::kGradient, static_cast<int64_t>(header.payload_bytes()));
  Submit(std::move(taken.admitted), header, {}, began, path_.AnswerInSlot(header, taken.gradient), taken.gradient);
}

void ExchangeStream::Submit(AdmittedContribution admitted, const v1::FrameHeader& header, Payload payload,
                            absl::Time began, ResultFn answer, std::optional<StreamRegion::Gradient> slot) {
  queue_->AddPendingAnswer();
  std::shared_ptr<StepSpan> span = SpanOf(header);
  auto ack = [queue = queue_, &observer = observer_, &clock = clock_, began, header, is_answered = answer != nullptr,
              slot = std::move(slot), span](const absl::StatusOr<bool>& duplicate) {
    observer.OnAcknowledged(clock.Now() - began);
    if (span != nullptr) span->OnAcknowledged(static_cast<int64_t>(header.payload_bytes()));
    if (duplicate.ok()) {
      PushAck(*queue, header, *duplicate);
    } else {
      if (slot.has_value()) slot->region->GiveBack(slot->slot);
      PushError(*queue, header, duplicate.status());
    }
    if (!is_answered || !duplicate.ok()) queue->MarkAnswered();
  };
  shard_.Submit(std::move(admitted), std::move(payload), std::move(ack),
                answer == nullptr ? ResultFn() : Traced(std::move(answer), std::move(span)));
}

}  // namespace precondor::rpc

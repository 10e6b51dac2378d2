// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/shard_link.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/control.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/status_codec.h"

namespace precondor {
namespace {

constexpr int kMostHeld =
    8;  // contributions that wait for a next one, but in slots: the shard begins with them meanwhile
constexpr absl::Duration kLastBackoff = absl::Seconds(2);
constexpr absl::Duration kCloseTimeout = absl::Seconds(1);  // for a stream that is half-closed

// Statuses of an ended stream that another attempt would also get.
bool IsFinal(grpc::StatusCode code) {
  return code == grpc::StatusCode::UNIMPLEMENTED || code == grpc::StatusCode::INVALID_ARGUMENT ||
         code == grpc::StatusCode::UNAUTHENTICATED || code == grpc::StatusCode::PERMISSION_DENIED;
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

ShardLink::ShardLink(Options options, Hooks hooks, TrafficCounters& traffic)
    : options_(std::move(options)),
      hooks_(std::move(hooks)),
      traffic_(traffic),
      backoff_(kFirstBackoff),
      epoch_(options_.epoch),
      path_({.address = options_.address, .connect_timeout = options_.connect_timeout}, [this] {
        MutexLock lock(mu_);
        Pump();
      }) {
  // The job has had earlier epochs: what other ranks repeat may hold old steps open.
  if (epoch_ > 1) outbox_.RetryRefusalsUntil(MonotonicNow() + options_.result_timeout);
}

ShardLink::~ShardLink() {
  {
    MutexLock lock(mu_);
    closing_ = true;
    changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return taking_.empty(); });
    if (state_ == StreamState::kOpen && outbox_.empty() && !writing_) {
      path_.OnStreamEnd();  // unmaps the region before the shard learns of the end
      stream_->HalfClose();
      changed_.wait_until(mu_, SteadyTime(MonotonicNow() + kCloseTimeout),
                          [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return state_ == StreamState::kNone; });
    }
  }
  Fail(absl::CancelledError(absl::StrCat("shard ", options_.address, ": the worker was destroyed")));
  MutexLock lock(mu_);
  changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return state_ == StreamState::kNone; });
  stream_.reset();
  stub_.reset();
}

absl::Status ShardLink::Submit(Outbox::Item item) {
  MutexLock lock(mu_);
  PRECONDOR_RETURN_IF_ERROR(failed_);
  PRECONDOR_RETURN_IF_ERROR(PayloadPath::CheckSlot(*item));
  const bool waits = item->may_wait && item->payload.size() < wire::kMaxBundledFrameBytes;
  const bool in_slot = item->region != nullptr;  // the shard inspects all of a message with one wait for its device
  PRECONDOR_RETURN_IF_ERROR(outbox_.Add(std::move(item)));
  if (!waits || (++held_ >= kMostHeld && !in_slot)) Pump();
  return absl::OkStatus();
}

void ShardLink::SendHeld() {
  MutexLock lock(mu_);
  if (held_ > 0) Pump();
}

absl::Time ShardLink::Tick(absl::Time now) {
  std::vector<Outbox::Item> expired;
  absl::Status broken;
  absl::Time next;
  {
    MutexLock lock(mu_);
    const bool was_sending = outbox_.sending();
    expired = outbox_.TakeExpired(now);
    // The shard holds the first part of that payload as long as the stream.
    if (was_sending && !outbox_.sending()) CancelStream();
    broken = broken_;
    for (const Outbox::Item& item : expired) {
      if (item->result == nullptr) hooks_.refused_statistics(LateError(item->id, broken));
      path_.Expire(*item);
    }
    NotifyIfAcknowledged();
    if (state_ == StreamState::kNone) stream_.reset();       // an ended call may still hold what it did not send
    if (!failed_.ok() && stream_ == nullptr) stub_.reset();  // and so may its connection
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
    const absl::Status late = LateError(item->id, broken);
    item.reset();  // releases the link's reference to the gradient's memory
    result->Fail(late);
    stuck |= !result->ready();
  }
  if (stuck) {
    // gRPC still refers to the caller's memory, and releases it only when the connection ends.
    MutexLock lock(mu_);
    renew_channel_ = true;
    CancelStream();
  }
  return next;
}

absl::Status ShardLink::LateError(const ContributionId& id, const absl::Status& broken) const {
  const std::string why =
      broken.ok()
          ? ""
          : absl::StrCat("; the last connection to this address, which the shard announces (--advertise), ended: ",
                         broken.message(), TlsHint(broken.message(), options_.security->has_tls()));
  return absl::DeadlineExceededError(absl::StrCat(
      "shard ", options_.address, ": session ", options_.session, " step ", id.step, " layer ", id.layer, ": ",
      KindName(id.kind), " not answered within ", absl::FormatDuration(options_.result_timeout), why));
}

void ShardLink::Connect(absl::Time now) {
  if (stub_ == nullptr || renew_channel_) {
    stub_ = std::make_unique<grpc::GenericStub>(MakeChannel(options_.address, *options_.security));
  }
  renew_channel_ = false;
  ahead_.reset();
  opening_.reset();
  writing_ = false;
  showed_secret_ = false;
  state_ = StreamState::kOpening;
  opening_deadline_ = now + options_.connect_timeout;
  stream_ = std::make_unique<ExchangeStream>(static_cast<ExchangeEvents*>(this), *stub_, options_.traceparent);
  stream_->Start();
}

void ShardLink::CancelStream() {
  if (state_ == StreamState::kNone) return;
  state_ = StreamState::kClosing;
  path_.OnStreamClosing();
  stream_->Cancel();
}

void ShardLink::ChangeEpoch(uint64_t epoch) {
  {
    MutexLock lock(mu_);
    if (epoch != epoch_) outbox_.Reopen();
    epoch_ = epoch;
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
    outbox_.RetryRefusalsUntil(MonotonicNow() + options_.result_timeout);
    Pump();
  }
  hooks_.wake();
}

void ShardLink::BeginAt(uint32_t layer, uint64_t step, uint64_t factor_version) {
  {
    MutexLock lock(mu_);
    outbox_.BeginAt(layer, step, factor_version);
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
  path_.StopWaiting();
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

// --- the end of a stream -------------------------------------------------------------------------------------------

void ShardLink::OnBroken() {
  MutexLock lock(mu_);
  state_ = StreamState::kClosing;
  path_.OnStreamClosing();
}

void ShardLink::OnMemoryBroken(const absl::Status& status) {
  MutexLock lock(mu_);
  memory_broken_ = status;
  CancelStream();
}

void ShardLink::OnStreamDone(const grpc::Status& status) {
  {
    MutexLock lock(mu_);
    // Answers that the stream has brought are copied before its slots end.
    changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return taking_.empty(); });
    state_ = StreamState::kClosing;
    const std::string why = status.ok() ? "the shard ended the stream" : status.error_message();
    broken_ = absl::UnavailableError(memory_broken_.ok() ? why : std::string(memory_broken_.message()));
    ahead_.reset();
    outbox_.StopStream();
    for (const Outbox::Item& item : outbox_.Items()) {
      if (item->result != nullptr) item->result->Restart();
    }
    connect_at_ = MonotonicNow() + backoff_;
    backoff_ = std::min(backoff_ * 2, kLastBackoff);
    if (!closing_ && failed_.ok()) traffic_.reconnects.fetch_add(1, std::memory_order_relaxed);
  }
  SendSlotsInline();
  if (IsFinal(status.error_code())) OnProtocolError(wire::FromGrpcStatus(status));
  // kNone is set last, and `wake` called under the lock, because the destructor waits for kNone.
  MutexLock lock(mu_);
  state_ = StreamState::kNone;
  changed_.notify_all();
  hooks_.wake();
}

void ShardLink::SendSlotsInline() {
  std::vector<Outbox::Item> items;
  {
    MutexLock lock(mu_);
    path_.OnStreamEnd();
    items = outbox_.Items();
  }
  for (const Outbox::Item& item : items) {
    if (item->region == nullptr) continue;
    absl::StatusOr<Outbox::Item> inlined = item->make_inline();
    {
      MutexLock lock(mu_);
      if (inlined.ok()) {
        outbox_.Replace(item, *std::move(inlined));
        continue;
      }
      if (outbox_.Holds(item)) outbox_.Remove(item->id);
    }
    item->result->Fail(inlined.status());
  }
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_link.h"

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "client/cpp/src/result_state.h"
#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

// Longer than a usual round trip, so that most streams live until something is lost on them.
constexpr int64_t kSilenceMicros = 6000;
constexpr int64_t kRetryMicros = 3000;
constexpr int64_t kRecoveryMicros = 1'000'000;
constexpr uint64_t kGenerations = 1'000'000;  // more than a process of a shard has

ContributionKind KindOf(v1::FrameKind kind) {
  if (kind == v1::FRAME_KIND_GRADIENT) return ContributionKind::kGradient;
  return kind == v1::FRAME_KIND_PULL ? ContributionKind::kPull : ContributionKind::kStatistics;
}

// As from the wire, in one chunk.
absl::Status Take(AnswerSink& sink, const GradientResult& result) {
  std::vector<wire::TensorFormat> tensors;
  for (const TensorDesc& tensor : result.tensors) tensors.push_back({tensor.dtype, tensor.dims, tensor.scale});
  const auto bytes = std::make_shared<const std::string>(
      result.bytes == nullptr ? std::string() : std::string(result.bytes->begin(), result.bytes->end()));
  absl::Status status = sink.Begin(tensors, bytes->size());
  if (status.ok()) status = sink.Append(0, wire::ReceivedBytes({*bytes}, bytes));
  return status;
}

}  // namespace

// The messages of one direction of a stream: in order and once, up to the first message that is lost.
template <typename Event>
class Pipe {
 public:
  uint64_t Number() { return sent_++; }
  // Calls `handle` for this message and for those that it was waited for with.
  template <typename Handle>
  void Arrive(uint64_t number, Event event, const Handle& handle) {
    if (number < arrived_) return;
    early_.try_emplace(number, std::move(event));
    while (!early_.empty() && early_.begin()->first == arrived_) {
      ++arrived_;
      handle(early_.extract(early_.begin()).mapped());
    }
  }

 private:
  uint64_t sent_ = 0;
  uint64_t arrived_ = 0;
  std::map<uint64_t, Event> early_;
};

// Outlives its link where messages are still on their way.
class SimLink::Stream : public std::enable_shared_from_this<Stream> {
 public:
  using AtShard = std::function<void(const std::shared_ptr<Stream>&)>;
  using AtRank = std::function<void(SimLink&)>;

  Stream(SimLink& link)
      : link_(&link),
        world_(link.world_),
        process_(link.process_),
        shard_(link.shard_),
        session_id_(link.options_.session_id) {}
  // Nothing comes of it any more.
  void End() { link_ = nullptr; }

  void Up(AtShard event) {
    world_.network().Send(process_, shard_.process(),
                          [self = shared_from_this(), number = up_.Number(), event = std::move(event)] {
                            self->up_.Arrive(number, event, [&](const AtShard& next) {
                              if (!self->MeetsItsShard()) return;
                              if (self->IsOfItsGeneration()) return next(self);
                              self->Down([](SimLink& link) { link.Connect(); });
                            });
                          });
  }
  void Down(AtRank event) {
    world_.network().Send(shard_.process(), process_,
                          [self = shared_from_this(), number = down_.Number(), event = std::move(event)] {
                            self->down_.Arrive(number, event, [&](const AtRank& next) { self->AtLink(next); });
                          });
  }
  // A process that has never heard of the stream says so.
  void Probe() {
    world_.network().Send(process_, shard_.process(), [self = shared_from_this()] {
      if (self->MeetsItsShard()) return;
      self->world_.network().Send(self->shard_.process(), self->process_,
                                  [self] { self->AtLink([](SimLink& link) { link.Connect(); }); });
    });
  }

 private:
  bool MeetsItsShard() {
    const uint64_t life = shard_.process().life();
    if (!shard_life_.has_value()) {
      shard_life_ = life;
      generation_ = shard_.generation();
    }
    return shard_life_ == life;
  }
  bool IsOfItsGeneration() const { return shard_.IsOf(session_id_, generation_); }
  void AtLink(const AtRank& event) {
    if (link_ != nullptr && process_.life() == life_) event(*link_);
  }

  SimLink* link_;
  World& world_;
  Process& process_;
  SimShard& shard_;
  const uint64_t life_ = process_.life();
  const uint64_t session_id_;
  std::optional<uint64_t> shard_life_;  // of the shard's process that took it
  uint64_t generation_ = 0;             // of that shard, when it did
  Pipe<AtShard> up_;
  Pipe<AtRank> down_;
};

SimLink::SimLink(World& world, Process& process, SimShard& shard, Options options, Hooks hooks)
    : world_(world),
      process_(process),
      shard_(shard),
      options_(options),
      hooks_(std::move(hooks)),
      epoch_(options.epoch) {
  if (epoch_ > 1) outbox_.RetryRefusalsUntil(Now() + absl::Microseconds(kRecoveryMicros));
  Connect();
}

SimLink::~SimLink() { Disconnect(); }

absl::Time SimLink::Now() const { return absl::FromUnixMicros(world_.queue().now_us()); }

std::string SimLink::Describe() const {
  std::string text = open_ ? "" : " no stream to " + shard_.process().name();
  for (const Outbox::Item& item : outbox_.Items()) {
    text += item->id.kind == v1::FRAME_KIND_GRADIENT ? " gradient "
            : item->id.kind == v1::FRAME_KIND_PULL   ? " pull "
            : item->id.kind == v1::FRAME_KIND_FETCH  ? " fetch "
                                                     : " statistics or resume ";
    text += std::to_string(item->id.layer) + "@" + std::to_string(item->id.step);
  }
  return text;
}

// --- streams --------------------------------------------------------------------------------------------------------

void SimLink::Disconnect() {
  if (stream_ != nullptr) stream_->End();
  stream_.reset();
  open_ = false;
  outbox_.StopStream();
}

void SimLink::Connect() {
  Disconnect();
  stream_ = std::make_shared<Stream>(*this);
  last_read_us_ = world_.queue().now_us();
  stream_->Up([shard = &shard_](const std::shared_ptr<Stream>& stream) {
    if (!shard->serving()) return;
    const uint64_t shard_generation = shard->process().life() * kGenerations + shard->generation();
    stream->Down([shard_generation](SimLink& link) { link.OnCredit(shard_generation); });
  });
}

void SimLink::Tick() {
  const bool silent = world_.queue().now_us() - last_read_us_ >= kSilenceMicros;
  if (silent && (!open_ || !outbox_.empty())) return Connect();
  stream_->Probe();
  Pump();
}

void SimLink::ChangeEpoch(uint64_t epoch) {
  if (epoch != epoch_) outbox_.Reopen();
  epoch_ = epoch;
  Connect();
}

void SimLink::BeginAt(uint32_t layer, uint64_t step, uint64_t factor_version) {
  outbox_.BeginAt(layer, step, factor_version);
  Pump();
}

void SimLink::OnCredit(uint64_t shard_generation) {
  if (open_) return;
  open_ = true;
  last_read_us_ = world_.queue().now_us();
  if (hooks_.last_first_order != nullptr) outbox_.ForgetVersionsBefore(hooks_.last_first_order());
  if (outbox_.StartStream(world_.scenario().credit_bytes, shard_generation)) {
    outbox_.RetryRefusalsUntil(Now() + absl::Microseconds(kRecoveryMicros));
  }
  Pump();
}

// --- frames ---------------------------------------------------------------------------------------------------------

void SimLink::Submit(Outbox::Item item) {
  if (absl::Status added = outbox_.Add(std::move(item)); !added.ok()) return hooks_.failed(added);
  Pump();
}

void SimLink::Pump() {
  while (const std::optional<Outbox::Frame> frame = outbox_.Next(Now())) Write(*frame);
}

ContributionHeader SimLink::HeaderOf(const Contribution& item) const {
  const bool gradient = item.id.kind == v1::FRAME_KIND_GRADIENT;
  ContributionHeader header;
  header.key = {.session_id = options_.session_id,
                .epoch = epoch_,
                .step = item.id.step,
                .layer = item.id.layer,
                .rank = options_.rank,
                .incarnation = options_.incarnation};
  header.kind = KindOf(item.id.kind);
  header.mode = item.mode;
  header.samples = item.samples;
  header.abstain = item.abstain;
  header.parts = item.parts;
  if (item.abstain || header.kind == ContributionKind::kPull) return header;
  const LayerSpec& shape = world_.spec().layers[item.id.layer];
  const int64_t q = VectorsPerWorker(world_.spec(), 0);
  if (!item.parts.empty()) {
    const int64_t sent = SentElements(item.parts);
    if (sent > 0) header.tensors = {{.dtype = DType::kF32, .dims = {1, sent}, .scale = 1}};
  } else if (gradient) {
    header.tensors = {{.dtype = DType::kF32, .dims = {shape.d_out, shape.d_in}, .scale = 1}};
  } else {
    header.tensors = {{.dtype = DType::kF32, .dims = {q, shape.d_in}, .scale = 1},
                      {.dtype = DType::kF32, .dims = {q, shape.d_out}, .scale = 1}};
  }
  return header;
}

void SimLink::Write(const Outbox::Frame& frame) {
  const Contribution& item = *frame.item;
  PRECONDOR_CHECK(frame.chunk.size == item.payload.size());
  if (item.id.kind == v1::FRAME_KIND_RESUME) {
    const RankResume resume{.key = HeaderOf(item).key,
                            .factor_version = item.factor_version,
                            .next_step = item.next_step.value_or(item.id.step),
                            .begins = item.abstain};
    stream_->Up([shard = &shard_, resume, id = item.id](const std::shared_ptr<Stream>& stream) {
      const absl::Status taken = shard->DeliverResume(resume).status();
      absl::StatusOr<bool> ack = false;
      if (!taken.ok()) ack = taken;
      stream->Down([epoch = resume.key.epoch, id, ack](SimLink& link) { link.OnAck(epoch, id, ack); });
    });
    return;
  }
  if (item.id.kind == v1::FRAME_KIND_FETCH) {
    stream_->Up([shard = &shard_, key = HeaderOf(item).key, id = item.id](const std::shared_ptr<Stream>& stream) {
      shard->DeliverFetch(key, [stream, epoch = key.epoch, id](const absl::StatusOr<GradientResult>& result) {
        stream->Down([epoch, id, result](SimLink& link) { link.OnResult(epoch, id, result); });
      });
    });
    return;
  }
  stream_->Up([shard = &shard_, header = HeaderOf(item), id = item.id,
               payload = Payload(item.payload.begin(), item.payload.end())](const std::shared_ptr<Stream>& stream) {
    shard->Deliver(
        header, payload,
        [stream, epoch = header.key.epoch, id](const absl::StatusOr<bool>& ack) {
          stream->Down([epoch, id, ack](SimLink& link) { link.OnAck(epoch, id, ack); });
        },
        [stream, epoch = header.key.epoch, id](const absl::StatusOr<GradientResult>& result) {
          stream->Down([epoch, id, result](SimLink& link) { link.OnResult(epoch, id, result); });
        });
  });
}

void SimLink::OnAck(uint64_t epoch, const ContributionId& id, const absl::StatusOr<bool>& ack) {
  last_read_us_ = world_.queue().now_us();
  if (epoch != epoch_) return;
  if (!ack.ok()) return OnRefused(id, ack.status());
  outbox_.Acknowledge(id);
  Pump();
}

void SimLink::OnResult(uint64_t epoch, const ContributionId& id, const absl::StatusOr<GradientResult>& result) {
  last_read_us_ = world_.queue().now_us();
  if (epoch != epoch_) return;
  if (!result.ok()) return OnRefused(id, result.status());
  const Outbox::Item item = outbox_.Find(id);
  if (item == nullptr || item->result == nullptr) return;
  const bool hands = id.kind != v1::FRAME_KIND_GRADIENT;
  const absl::Status taken = hands ? Take(*item->result, *result) : absl::OkStatus();
  const bool keep = options_.keep_gradients && outbox_.keeps_gradients();
  outbox_.Finish(id, keep ? Outbox::CopyToKeep(*item) : nullptr, result->factor_version);
  Pump();
  if (!taken.ok()) return hooks_.failed(taken);
  item->result->Complete({result->decision, result->factor_version, result->inner_product, result->reason});
  if (hands) return hooks_.handed();
  hooks_.answered(id.layer, *result);
}

void SimLink::OnRefused(const ContributionId& id, const absl::Status& status) {
  const Recovery recovery = outbox_.RecoveryOf(id, status, Now());
  if (outbox_.Find(id) == nullptr) return;
  Outbox::Item item;
  bool counted = false;
  if (recovery == Recovery::kRetryLater) outbox_.RetryAfter(id, Now(), absl::Microseconds(kRetryMicros));
  if (recovery == Recovery::kRefreshEpoch) outbox_.Park(id);
  if (outbox_.CountsAsAbstention(id, status)) {
    (void)outbox_.AbstainInstead(id);
  } else if (recovery == Recovery::kRefused) {
    counted = outbox_.WasCounted(id, status);
    item = outbox_.Remove(id);
  }
  Pump();
  if (recovery == Recovery::kRefreshEpoch) hooks_.stale_epoch(epoch_);
  if (recovery == Recovery::kFatal) hooks_.failed(status);
  if (item == nullptr || counted) return;
  if (id.kind == v1::FRAME_KIND_PULL || id.kind == v1::FRAME_KIND_FETCH) {
    item->result->Fail(status);
    return hooks_.handed();
  }
  hooks_.failed(status);
}

}  // namespace precondor::sim

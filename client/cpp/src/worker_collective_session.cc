// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/worker_collective_session.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/clock.h"
#include "kernels/base/dtype.h"
#include "kernels/base/samples.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_name.h"
#include "kernels/cpu/local_collective.h"
#include "kernels/cuda/nccl_module.h"

namespace precondor {
namespace {

constexpr uint64_t kAllSteps = std::numeric_limits<uint64_t>::max();
constexpr absl::string_view kNccl = "nccl";

// The payload is a caller's matrix or a heap block, both aligned for f32.
absl::Span<const float> FloatsOf(const Contribution& item) {
  return absl::MakeConstSpan(reinterpret_cast<const float*>(item.payload.data()), item.payload.size() / sizeof(float));
}

// Writes share * gradient to `out`; zeros for share 0, whatever the gradient holds.
void Weigh(float share, absl::Span<const float> gradient, absl::Span<float> out) {
  if (share == 0.0f) {
    std::fill(out.begin(), out.end(), 0.0f);
  } else {
    for (size_t i = 0; i < out.size(); ++i) out[i] = share * gradient[i];
  }
}

}  // namespace

WorkerCollectiveSession::WorkerCollectiveSession(Options options, Hooks hooks)
    : options_(std::move(options)), hooks_(std::move(hooks)), thread_([this] { Run(); }) {}

WorkerCollectiveSession::~WorkerCollectiveSession() {
  Leave();
  thread_.join();
}

int64_t WorkerCollectiveSession::ElementsOf(uint32_t layer) const {
  return options_.layers[layer].d_out * options_.layers[layer].d_in;
}

// --- gradients ----------------------------------------------------------------------------------------------------

std::vector<ContributionId> WorkerCollectiveSession::TakePending(uint64_t end, std::vector<Item>& freed) {
  std::vector<ContributionId> ids;
  while (!pending_.empty() && pending_.begin()->first < end) {
    next_grpc_ = std::max(next_grpc_, pending_.begin()->first + 1);
    for (auto& [layer, item] : pending_.begin()->second) {
      ids.push_back(item->id);
      freed.push_back(std::move(item));
    }
    pending_.erase(pending_.begin());
  }
  return ids;
}

std::vector<ContributionId> WorkerCollectiveSession::BeginEpoch(uint64_t epoch) {
  std::shared_ptr<Collective> former;
  std::vector<Item> freed;
  std::vector<ContributionId> ids;
  {
    MutexLock lock(mu_);
    if (epoch == epoch_ || stopping_) return {};
    epoch_ = epoch;
    phase_ = Phase::kHolding;
    status_ = absl::OkStatus();
    give_up_ = true;
    former = std::exchange(collective_, nullptr);
    ids = TakePending(kAllSteps, freed);
    changed_.notify_all();
  }
  if (former != nullptr) former->Abort(absl::StrCat("epoch ", epoch, " has begun"));
  return ids;
}

bool WorkerCollectiveSession::Offer(const Item& item) {
  MutexLock lock(mu_);
  const ContributionId& id = item->id;
  bool takes = !stopping_ && phase_ != Phase::kOff && id.step >= next_grpc_;
  if (phase_ == Phase::kOn) takes = takes && id.step >= first_;
  if (!takes) {
    next_grpc_ = std::max(next_grpc_, id.step + 1);
    return false;
  }
  if (!pending_[id.step].try_emplace(id.layer, item).second) {  // an expired one with this id is still held
    next_grpc_ = std::max(next_grpc_, id.step + 1);
    return false;
  }
  last_offer_ = MonotonicNow();
  changed_.notify_all();
  return true;
}

void WorkerCollectiveSession::Leave() {
  std::shared_ptr<Collective> collective;
  std::vector<Item> freed;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    phase_ = Phase::kOff;
    if (status_.ok()) status_ = absl::CancelledError(absl::StrCat(options_.what, ": the worker leaves"));
    give_up_ = true;
    collective = collective_;
    TakePending(kAllSteps, freed);
    changed_.notify_all();
  }
  if (collective != nullptr) collective->Abort("the worker leaves");
}

absl::Status WorkerCollectiveSession::status() const {
  MutexLock lock(mu_);
  return status_;
}

// --- the thread ---------------------------------------------------------------------------------------------------

void WorkerCollectiveSession::Run() {
  NameThisThread("precondor-plane");
  uint64_t served = 0;
  while (true) {
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || epoch_ != served; });
      if (stopping_) return;
      served = epoch_;
      give_up_ = false;
    }
    Finish(served, Serve(served));
    group_.reset();
  }
}

void WorkerCollectiveSession::Finish(uint64_t epoch, const absl::Status& why) {
  std::shared_ptr<Collective> ended;
  std::vector<Item> freed;
  std::vector<ContributionId> ids;
  {
    MutexLock lock(mu_);
    if (epoch_ == epoch && !stopping_) {
      phase_ = Phase::kOff;
      status_ = absl::Status(why.code(), absl::StrCat(options_.what, ": ", why.message()));
      ended = std::exchange(collective_, nullptr);
      ids = TakePending(kAllSteps, freed);
    }
  }
  freed.clear();
  hooks_.give_back(ids);
  if (ended == nullptr || !ended->status().ok()) return;
  // The communicator had no error: this rank is the first to end it.
  hooks_.decline(epoch, why);
  ended->Abort(why.message());
}

absl::Status WorkerCollectiveSession::Serve(uint64_t epoch) {
  PRECONDOR_RETURN_IF_ERROR(Join(epoch));
  PRECONDOR_RETURN_IF_ERROR(AgreeOnFirstStep());
  while (true) PRECONDOR_RETURN_IF_ERROR(ServeStep());
}

absl::Status WorkerCollectiveSession::CheckRendezvous(const PlaneRendezvous& rendezvous) const {
  if (rendezvous.transport != "local" && rendezvous.transport != kNccl) {
    return absl::UnimplementedError(
        absl::StrCat("expected a communicator of kind \"local\" or \"nccl\", got \"", rendezvous.transport, "\""));
  }
  if (rendezvous.timeout <= absl::ZeroDuration()) return absl::InvalidArgumentError("expected a positive time-out");
  std::vector<bool> taken(options_.layers.size());
  if (rendezvous.buckets.empty()) return absl::InvalidArgumentError("expected buckets, got none");
  for (const std::vector<uint32_t>& layers : rendezvous.buckets) {
    if (layers.empty()) return absl::InvalidArgumentError("expected buckets of layers, got an empty one");
    for (const uint32_t layer : layers) {
      if (layer >= taken.size() || taken[layer]) {
        return absl::InvalidArgumentError(
            absl::StrCat("expected buckets of different layers below ", taken.size(), ", got layer ", layer));
      }
      taken[layer] = true;
    }
  }
  return absl::OkStatus();
}

absl::Status WorkerCollectiveSession::Join(uint64_t epoch) {
  PRECONDOR_ASSIGN_OR_RETURN(const PlaneRendezvous rendezvous, hooks_.ask(epoch));
  absl::StatusOr<std::shared_ptr<Collective>> collective = MakeCollective(rendezvous);
  if (!collective.ok()) {
    hooks_.decline(epoch, collective.status());
    return collective.status();
  }
  MutexLock lock(mu_);
  if (stopping_ || epoch_ != epoch) return absl::AbortedError("another epoch has begun");
  group_ = collective_ = *std::move(collective);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Collective>> WorkerCollectiveSession::MakeCollective(const PlaneRendezvous& rendezvous) {
  PRECONDOR_RETURN_IF_ERROR(CheckRendezvous(rendezvous));
  timeout_ = std::min(rendezvous.timeout, options_.longest);
  buckets_.clear();
  int64_t widest = 0;
  for (const std::vector<uint32_t>& layers : rendezvous.buckets) {
    Bucket& bucket = buckets_.emplace_back();
    bucket.layers = layers;
    for (const uint32_t layer : layers) bucket.elements += ElementsOf(layer);
    widest = std::max(widest, bucket.elements);
  }
  staging_.resize(static_cast<size_t>(widest));
  const int size = options_.world_size + 1;
  if (rendezvous.transport == kNccl) {
    const NcclOptions as{.device = options_.device, .give_up = &give_up_};
    return LoadHostNcclCollective(rendezvous.unique_id, options_.rank, size, as, timeout_);
  }
  return MakeLocalCollective(rendezvous.unique_id, options_.rank, size, timeout_, &give_up_);
}

absl::Status WorkerCollectiveSession::AgreeOnFirstStep() {
  const size_t width = static_cast<size_t>(wire::PlaneElements(wire::kPlaneHelloBytes));
  std::vector<float> mine(width), all(width * static_cast<size_t>(options_.world_size + 1));
  {
    MutexLock lock(mu_);
    wire::ToPlaneElements(wire::EncodePlaneHello(std::max(next_grpc_, after_answered_)), absl::MakeSpan(mine));
  }
  PRECONDOR_RETURN_IF_ERROR(
      group_->AllGather(DType::kF32, mine.data(), all.data(), static_cast<int64_t>(width), timeout_));
  uint64_t first = 0;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const absl::Span<const float> row = absl::MakeConstSpan(all).subspan(static_cast<size_t>(rank) * width, width);
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t theirs,
                               wire::DecodePlaneHello(wire::FromPlaneElements(row, wire::kPlaneHelloBytes)));
    first = std::max(first, theirs);
  }
  std::vector<Item> freed;
  std::vector<ContributionId> ids;
  {
    MutexLock lock(mu_);
    if (phase_ != Phase::kHolding || collective_ != group_) return absl::AbortedError("the epoch is over");
    phase_ = Phase::kOn;
    first_ = first;
    ids = TakePending(first, freed);
  }
  freed.clear();
  hooks_.give_back(ids);
  return absl::OkStatus();
}

absl::Status WorkerCollectiveSession::ServeStep() {
  std::optional<uint64_t> step;
  for (uint32_t index = 0; index < buckets_.size(); ++index) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<Item> items, AwaitBucket(buckets_[index], step));
    PRECONDOR_RETURN_IF_ERROR(Reduce(index, items));
  }
  for (uint32_t index = 0; index < buckets_.size(); ++index) PRECONDOR_RETURN_IF_ERROR(Receive(index, *step));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<WorkerCollectiveSession::Item>> WorkerCollectiveSession::AwaitBucket(
    const Bucket& bucket, std::optional<uint64_t>& step) {
  MutexLock lock(mu_);
  while (true) {
    if (phase_ != Phase::kOn || collective_ != group_) return absl::AbortedError("the epoch is over");
    if (!step.has_value() && !pending_.empty()) step = pending_.begin()->first;
    const auto found = step.has_value() ? pending_.find(*step) : pending_.end();
    if (found != pending_.end()) {
      std::vector<Item> items;
      for (const uint32_t layer : bucket.layers) {
        const auto item = found->second.find(layer);
        if (item != found->second.end()) items.push_back(item->second);
      }
      if (items.size() == bucket.layers.size()) return items;
    }
    if (pending_.empty()) {
      changed_.wait(mu_);  // the job may pause between steps
      continue;
    }
    // The caller may wait for an answer before it submits the rest of the step.
    const absl::Time until = last_offer_ + timeout_;
    if (MonotonicNow() >= until) {
      return absl::DeadlineExceededError(absl::StrCat("step ", *step, ": not all of this rank's gradients came within ",
                                                      absl::FormatDuration(timeout_), " of each other"));
    }
    changed_.wait_until(mu_, SteadyTime(until));
  }
}

// Returns each layer's samples summed over all ranks; 0 if a rank has none.
absl::StatusOr<std::vector<uint64_t>> WorkerCollectiveSession::ExchangeOffers(const wire::PlaneOffer& offer) {
  const size_t layers = offer.parts.size();
  const size_t bytes = wire::PlaneOfferBytes(layers);
  const size_t width = static_cast<size_t>(wire::PlaneElements(bytes));
  std::vector<float> mine(width), all(width * static_cast<size_t>(options_.world_size + 1));
  wire::ToPlaneElements(wire::EncodePlaneOffer(offer), absl::MakeSpan(mine));
  PRECONDOR_RETURN_IF_ERROR(
      group_->AllGather(DType::kF32, mine.data(), all.data(), static_cast<int64_t>(width), timeout_));
  std::vector<uint64_t> totals(layers);
  std::vector<bool> complete(layers, true);
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const absl::Span<const float> row = absl::MakeConstSpan(all).subspan(static_cast<size_t>(rank) * width, width);
    PRECONDOR_ASSIGN_OR_RETURN(const wire::PlaneOffer theirs,
                               wire::DecodePlaneOffer(wire::FromPlaneElements(row, bytes), layers));
    if (theirs.step != offer.step || theirs.bucket != offer.bucket || theirs.mode != offer.mode) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", options_.rank, " has step ", offer.step, " in ",
                                                     ModeName(offer.mode), ", rank ", rank, " has step ", theirs.step,
                                                     " in ", ModeName(theirs.mode)));
    }
    for (size_t i = 0; i < layers; ++i) {
      totals[i] += theirs.parts[i].samples;
      complete[i] = complete[i] && theirs.parts[i].samples > 0;
    }
  }
  for (size_t i = 0; i < layers; ++i) {
    if (!complete[i]) totals[i] = 0;
  }
  return totals;
}

absl::Status WorkerCollectiveSession::Reduce(uint32_t index, const std::vector<Item>& items) {
  wire::PlaneOffer offer{.step = items[0]->id.step, .bucket = index, .mode = items[0]->mode, .parts = {}};
  for (const Item& item : items) {
    const bool refused = !item->abstain && !AllFinite(FloatsOf(*item));
    offer.parts.push_back({.samples = item->abstain || refused ? 0 : item->samples, .refused = refused});
  }
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> totals, ExchangeOffers(offer));
  std::vector<CollectiveCall> calls;
  size_t begin = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t elements = ElementsOf(items[i]->id.layer);
    const absl::Span<float> share = absl::MakeSpan(staging_).subspan(begin, static_cast<size_t>(elements));
    Weigh(totals[i] == 0 ? 0.0f : ShareOf(items[i]->samples, totals[i]), FloatsOf(*items[i]), share);
    calls.push_back({.kind = CollectiveKind::kReduce,
                     .dtype = DType::kF32,
                     .in = share.data(),
                     .out = nullptr,
                     .count = elements,
                     .root = options_.world_size});
    begin += static_cast<size_t>(elements);
  }
  return group_->Run(calls, timeout_);
}

absl::Status WorkerCollectiveSession::Receive(uint32_t index, uint64_t step) {
  Bucket& bucket = buckets_[index];
  if (bucket.answers == nullptr || bucket.answers.use_count() > 1) {
    bucket.answers = std::make_shared<std::vector<float>>(static_cast<size_t>(bucket.elements));
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // orders the reuse of `answers` after its last reader's reads
  std::vector<float> outcomes(static_cast<size_t>(wire::PlaneElements(bucket.layers.size() * wire::kPlaneAnswerBytes)));
  std::vector<CollectiveCall> calls;
  const auto receive = [&](float* out, int64_t count) {
    calls.push_back({.kind = CollectiveKind::kBroadcast,
                     .dtype = DType::kF32,
                     .in = nullptr,
                     .out = out,
                     .count = count,
                     .root = options_.world_size});
  };
  receive(outcomes.data(), static_cast<int64_t>(outcomes.size()));
  float* out = bucket.answers->data();
  for (const uint32_t layer : bucket.layers) {
    receive(out, ElementsOf(layer));
    out += ElementsOf(layer);
  }
  PRECONDOR_RETURN_IF_ERROR(group_->Run(calls, timeout_));
  for (size_t i = 0; i < bucket.layers.size(); ++i) {
    const absl::Span<const float> entry =
        absl::MakeConstSpan(outcomes).subspan(i * wire::kPlaneAnswerBytes / sizeof(float));
    PRECONDOR_ASSIGN_OR_RETURN(const wire::PlaneAnswer answer,
                               wire::DecodePlaneAnswer(wire::FromPlaneElements(entry, wire::kPlaneAnswerBytes)));
    Item item;
    {
      MutexLock lock(mu_);
      const auto found = pending_.find(step);
      if (collective_ != group_ || found == pending_.end()) return absl::AbortedError("the epoch is over");
      after_answered_ = std::max(after_answered_, step + 1);
      item = std::move(found->second[bucket.layers[i]]);
      found->second.erase(bucket.layers[i]);
      if (found->second.empty()) pending_.erase(found);
    }
    wire::ReceivedBytes values;
    if (answer.decision != Decision::kSkip) {
      const char* data = reinterpret_cast<const char*>(static_cast<const float*>(calls[i + 1].out));
      const size_t bytes = static_cast<size_t>(calls[i + 1].count) * sizeof(float);
      values = wire::ReceivedBytes({absl::string_view(data, bytes)}, bucket.answers);
    }
    hooks_.answered(std::move(item), answer, values);
  }
  return absl::OkStatus();
}

}  // namespace precondor

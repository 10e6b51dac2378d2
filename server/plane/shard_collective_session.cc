// SPDX-License-Identifier: Apache-2.0
#include "server/plane/shard_collective_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/deadline.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_name.h"

namespace precondor {
namespace {

// How long the shard waits for the ranks to begin a bucket. Ranks wait for each other no longer than the timeout, but a
// job can pause between steps.
constexpr absl::Duration kRest = absl::Hours(24 * 365);

std::string OfferText(const wire::PlaneOffer& offer) {
  return absl::StrCat("step ", offer.step, " bucket ", offer.bucket, " in ", ModeName(offer.mode));
}

}  // namespace

std::vector<std::vector<uint32_t>> PlaneBuckets(const SessionSpec& spec, const std::vector<uint32_t>& layers) {
  std::vector<std::vector<uint32_t>> buckets;
  int64_t filled = 0;
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    const int64_t elements = spec.layers[*layer].d_out * spec.layers[*layer].d_in;
    if (buckets.empty() || filled + elements > kPlaneBucketElements) {
      buckets.emplace_back();
      filled = 0;
    }
    buckets.back().push_back(*layer);
    filled += elements;
  }
  return buckets;
}

ShardCollectiveSession::ShardCollectiveSession(ShardDataPlane& shard, Logger& logger, TransferObserver& observer,
                                               const PlaneTransport& transport, PlaneTransport::Rendezvous rendezvous,
                                               uint64_t session_id, uint64_t epoch, ShardDataPlane::SessionPart part,
                                               absl::Duration timeout)
    : shard_(shard),
      logger_(logger),
      observer_(observer),
      transport_(transport),
      session_id_(session_id),
      epoch_(epoch),
      spec_(std::move(part.spec)),
      ranks_(spec_.world_size),
      rendezvous_info_{.transport = transport.name,
                       .unique_id = std::move(rendezvous.unique_id),
                       .timeout = timeout,
                       .buckets = PlaneBuckets(spec_, part.layers)},
      place_(std::move(rendezvous.place)),
      thread_([this] { Run(); }) {}

ShardCollectiveSession::~ShardCollectiveSession() {
  End("the shard is shutting down");
  thread_.join();
}

absl::Status ShardCollectiveSession::status() const {
  MutexLock lock(mu_);
  return status_;
}

void ShardCollectiveSession::End(absl::string_view reason, bool in_order) {
  std::shared_ptr<Collective> collective;
  std::shared_ptr<Answers> awaited;
  {
    MutexLock lock(mu_);
    if (end_reason_.empty()) {
      end_reason_ = std::string(reason);
      ended_in_order_ = in_order;
    }
    collective = collective_;
    awaited = awaited_;
  }
  give_up_ = true;
  if (collective != nullptr) collective->Abort(reason);
  if (awaited == nullptr) return;
  MutexLock lock(awaited->mu);
  awaited->given_up = true;
  awaited->changed.notify_all();
}

void ShardCollectiveSession::Run() {
  NameThisThread("plane");
  Finish(Serve());
}

absl::Status ShardCollectiveSession::Serve() {
  PRECONDOR_RETURN_IF_ERROR(Join());
  while (true) PRECONDOR_RETURN_IF_ERROR(Step());
}

absl::Status ShardCollectiveSession::Join() {
  absl::StatusOr<std::unique_ptr<Collective>> joined =
      transport_.join(rendezvous_info_.unique_id, ranks_, ranks_ + 1, rendezvous_info_.timeout, &give_up_);
  place_.reset();
  PRECONDOR_RETURN_IF_ERROR(joined.status());
  std::shared_ptr<Collective> collective = *std::move(joined);
  {
    MutexLock lock(mu_);
    if (!end_reason_.empty()) return absl::AbortedError(end_reason_);
    collective_ = collective;
  }
  group_ = collective.get();
  int64_t widest = 0;
  for (const auto& bucket : rendezvous_info_.buckets) {
    for (const uint32_t layer : bucket) widest = std::max(widest, ElementsOf(layer));
  }
  zeros_.resize(static_cast<size_t>(widest));
  observer_.OnDataPlane(spec_.name, true);
  logger_.Log(Severity::kInfo, "gradients go over a communicator",
              {{"session", spec_.name}, {"epoch", epoch_}, {"transport", transport_.name}, {"ranks", ranks_}});
  // The ranks use these values to agree on their first step. The shard's own value has no meaning.
  std::vector<float> mine(wire::PlaneElements(wire::kPlaneHelloBytes));
  std::vector<float> all(mine.size() * static_cast<size_t>(ranks_ + 1));
  wire::ToPlaneElements(wire::EncodePlaneHello(0), absl::MakeSpan(mine));
  return group_->AllGather(DType::kF32, mine.data(), all.data(), static_cast<int64_t>(mine.size()),
                           rendezvous_info_.timeout);
}

int64_t ShardCollectiveSession::ElementsOf(uint32_t layer) const {
  return spec_.layers[layer].d_out * spec_.layers[layer].d_in;
}

absl::Status ShardCollectiveSession::Step() {
  size_t layers = 0;
  for (const auto& bucket : rendezvous_info_.buckets) layers += bucket.size();
  const auto answers = std::make_shared<Answers>();
  {
    MutexLock lock(answers->mu);
    answers->results.resize(layers, absl::UnknownError(""));
    answers->there.resize(layers);
  }
  {
    MutexLock lock(mu_);
    if (!end_reason_.empty()) return absl::AbortedError(end_reason_);
    awaited_ = answers;
  }
  // Core preconditions the first buckets while the next ones are reduced.
  std::vector<size_t> first;
  size_t place = 0;
  for (uint32_t bucket = 0; bucket < rendezvous_info_.buckets.size(); ++bucket) {
    first.push_back(place);
    PRECONDOR_RETURN_IF_ERROR(Take(bucket, place, answers));
    place += rendezvous_info_.buckets[bucket].size();
  }
  for (uint32_t bucket = 0; bucket < rendezvous_info_.buckets.size(); ++bucket) {
    PRECONDOR_RETURN_IF_ERROR(Give(bucket, first[bucket], *answers));
  }
  busy_ = false;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<wire::PlaneOffer>> ShardCollectiveSession::GatherOffers(uint32_t bucket) {
  const size_t layers = rendezvous_info_.buckets[bucket].size();
  const size_t bytes = wire::PlaneOfferBytes(layers);
  const size_t width = static_cast<size_t>(wire::PlaneElements(bytes));
  std::vector<float> mine(width), all(width * static_cast<size_t>(ranks_ + 1));
  PRECONDOR_RETURN_IF_ERROR(
      group_->AllGather(DType::kF32, mine.data(), all.data(), static_cast<int64_t>(width), kRest));
  std::vector<wire::PlaneOffer> offers;
  for (int rank = 0; rank < ranks_; ++rank) {
    const absl::Span<const float> row = absl::MakeConstSpan(all).subspan(static_cast<size_t>(rank) * width, width);
    PRECONDOR_ASSIGN_OR_RETURN(wire::PlaneOffer offer,
                               wire::DecodePlaneOffer(wire::FromPlaneElements(row, bytes), layers));
    const bool same = offers.empty() || (offer.step == offers[0].step && offer.mode == offers[0].mode);
    if (offer.bucket != bucket || !same) {
      return absl::InvalidArgumentError(absl::StrCat("expected bucket ", bucket, " of the same step from all, got ",
                                                     OfferText(offer), " from rank ", rank, ", ",
                                                     OfferText(offers.empty() ? offer : offers[0]), " from rank 0"));
    }
    offers.push_back(std::move(offer));
  }
  return offers;
}

absl::Status ShardCollectiveSession::Take(uint32_t bucket, size_t first, const std::shared_ptr<Answers>& answers) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<wire::PlaneOffer> offers, GatherOffers(bucket));
  busy_ = true;
  const std::vector<uint32_t>& layers = rendezvous_info_.buckets[bucket];
  std::vector<ReducedGradient> gradients;
  std::vector<CollectiveCall> calls;
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t elements = ElementsOf(layers[i]);
    ReducedGradient& gradient = gradients.emplace_back(ReducedGradient{.session_id = session_id_,
                                                                       .epoch = epoch_,
                                                                       .step = offers[0].step,
                                                                       .layer = layers[i],
                                                                       .mode = offers[0].mode,
                                                                       .shares = {},
                                                                       .average = {}});
    for (const wire::PlaneOffer& offer : offers) {
      gradient.shares.push_back({offer.parts[i].samples, offer.parts[i].refused});
    }
    gradient.average.resize(static_cast<size_t>(elements) * sizeof(float));
    calls.push_back({.kind = CollectiveKind::kReduce,
                     .dtype = DType::kF32,
                     .in = zeros_.data(),
                     .out = gradient.average.data(),
                     .count = elements,
                     .root = ranks_});
  }
  PRECONDOR_RETURN_IF_ERROR(group_->Run(calls, rendezvous_info_.timeout));
  for (const ReducedGradient& gradient : gradients) {
    observer_.OnReceived(TransferPath::kCollective, TransferKind::kGradient,
                         static_cast<int64_t>(gradient.average.size()));
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const size_t place = first + i;
    PRECONDOR_RETURN_IF_ERROR(
        shard_.SubmitReduced(std::move(gradients[i]), [answers, place](absl::StatusOr<GradientResult> result) {
          MutexLock lock(answers->mu);
          answers->results[place] = std::move(result);
          answers->there[place] = true;
          answers->changed.notify_all();
        }));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<GradientResult>> ShardCollectiveSession::Await(Answers& answers, size_t first,
                                                                          size_t count) {
  const auto until = SteadyTime(MonotonicNow() + rendezvous_info_.timeout);
  MutexLock lock(answers.mu);
  const bool complete = answers.changed.wait_until(answers.mu, until, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(answers.mu) {
    const auto begin = answers.there.begin() + static_cast<int64_t>(first);
    return answers.given_up ||
           std::all_of(begin, begin + static_cast<int64_t>(count), [](bool there) { return there; });
  });
  if (answers.given_up) return absl::AbortedError("the plane was ended");
  if (!complete) {
    return absl::DeadlineExceededError(
        absl::StrCat("answers were not ready within ", absl::FormatDuration(rendezvous_info_.timeout)));
  }
  std::vector<GradientResult> results;
  for (size_t i = first; i < first + count; ++i) {
    PRECONDOR_RETURN_IF_ERROR(answers.results[i].status());
    results.push_back(*answers.results[i]);
  }
  return results;
}

absl::Status ShardCollectiveSession::Give(uint32_t bucket, size_t first, Answers& answers) {
  const std::vector<uint32_t>& layers = rendezvous_info_.buckets[bucket];
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<GradientResult> results, Await(answers, first, layers.size()));
  std::string outcomes;
  for (const GradientResult& result : results) {
    outcomes += wire::EncodePlaneAnswer({.decision = result.decision,
                                         .factor_version = result.factor_version,
                                         .inner_product = result.inner_product,
                                         .reason = result.reason});
  }
  std::vector<float> words(static_cast<size_t>(wire::PlaneElements(outcomes.size())));
  wire::ToPlaneElements(outcomes, absl::MakeSpan(words));
  std::vector<CollectiveCall> calls;
  const auto send = [&](const void* data, int64_t count) {
    // The root's broadcast in place does not change the data: other threads can be reading an answer.
    calls.push_back({.kind = CollectiveKind::kBroadcast,
                     .dtype = DType::kF32,
                     .in = data,
                     .out = const_cast<void*>(data),
                     .count = count,
                     .root = ranks_});
  };
  send(words.data(), static_cast<int64_t>(words.size()));
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t elements = ElementsOf(layers[i]);
    const bool skipped = results[i].bytes == nullptr;
    if (!skipped && results[i].bytes->size() != static_cast<size_t>(elements) * sizeof(float)) {
      return absl::InternalError(absl::StrCat("layer ", layers[i], ": expected an answer of ", elements,
                                              " f32, got one of ", results[i].bytes->size(), " bytes"));
    }
    observer_.OnSent(TransferPath::kCollective, TransferKind::kAnswer, elements * static_cast<int64_t>(sizeof(float)));
    send(skipped ? static_cast<const void*>(zeros_.data()) : results[i].bytes->data(), elements);
  }
  return group_->Run(calls, rendezvous_info_.timeout);
}

void ShardCollectiveSession::Finish(const absl::Status& why) {
  std::shared_ptr<Collective> collective;
  std::string reason;
  bool ended_in_order = false;
  {
    MutexLock lock(mu_);
    status_ = end_reason_.empty() ? why : absl::AbortedError(end_reason_);
    ended_in_order = ended_in_order_;
    collective = std::exchange(collective_, nullptr);
    awaited_ = nullptr;
    busy_ = false;
    reason = end_reason_;
  }
  // Distinguishes an orderly end from a failure. A rank that leaves in order aborts the communicator. If this shard
  // ended it, End recorded which one it is.
  const bool left = reason.empty() ? collective != nullptr && absl::IsAborted(collective->status()) : ended_in_order;
  const bool in_order = left || !shard_.IsInEpoch(session_id_, epoch_);
  if (collective != nullptr) collective->Abort(why.message());  // no effect if it has ended already
  observer_.OnDataPlane(spec_.name, false);
  if (!in_order) observer_.OnDataPlaneFailure(spec_.name);
  logger_.Log(in_order ? Severity::kInfo : Severity::kWarning, "gradients go over gRPC until the next epoch",
              {{"session", spec_.name},
               {"epoch", epoch_},
               {"reason", reason.empty() ? why.message() : absl::string_view(reason)}});
}

}  // namespace precondor

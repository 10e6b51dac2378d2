// SPDX-License-Identifier: Apache-2.0
// What comes from outside the strand: contributions, ranks, epochs. layer_driver_work.cc has the strand's side.
#include "server/core/layer/layer_driver.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/payload.h"
#include "server/core/reservation.h"

namespace precondor {
namespace {

LayerRules RulesOf(const SessionContext& session, uint32_t layer) {
  const ShardOptions& options = session.shard->options;
  return {.spec = &session.spec,
          .layer = layer,
          .needs_statistics = session.methods.of(layer).needs_statistics(),
          .window_steps = static_cast<uint64_t>(options.window_steps),
          .quorum = options.quorum,
          .statistics_deadline = options.statistics_deadline};
}

absl::StatusOr<bool> OutcomeOf(const Effect& effect) {
  if (const auto* refuse = std::get_if<Refuse>(&effect)) return refuse->status;
  return std::get<precondor::Acknowledge>(effect).duplicate;
}

uint64_t SamplesOf(const ReducedGradient& gradient) {
  uint64_t samples = 0;
  for (const ReducedGradient::Share& share : gradient.shares) samples += share.samples;
  return samples;
}

ContributionStatus StatusOf(const ReducedGradient::Share& share) {
  if (share.refused) return ContributionStatus::kRefused;
  return share.samples == 0 ? ContributionStatus::kAbstained : ContributionStatus::kPresent;
}

}  // namespace

absl::StatusOr<std::shared_ptr<LayerDriver>> LayerDriver::Create(std::shared_ptr<SessionContext> session,
                                                                 uint32_t layer, const SessionInstall& install,
                                                                 bool held) {
  std::unique_ptr<LayerState> state;
  if (held) {
    PRECONDOR_ASSIGN_OR_RETURN(state, session->MakeState(layer));
  }
  return std::shared_ptr<LayerDriver>(new LayerDriver(std::move(session), layer, install, std::move(state)));
}

LayerDriver::LayerDriver(std::shared_ptr<SessionContext> session, uint32_t layer, const SessionInstall& install,
                         std::unique_ptr<LayerState> state)
    : session_(std::move(session)),
      layer_(layer),
      executor_(session_->DeviceOf(layer).executor),
      strand_(executor_.NewStrand()),
      worker_(*session_, layer, std::move(state)),
      journal_(*session_, layer, install.rollback_epoch),
      machine_(RulesOf(*session_, layer), install.epoch, install.rollback_epoch, install.members) {
  stats_.layer = layer;
  stats_.name = session_->spec.layers[layer].name;
  stats_.device = session_->DeviceOf(layer).place;
  ShowFactors();
}

absl::Status LayerDriver::Check(const ContributionHeader& header) const {
  MutexLock lock(mu_);
  return machine_.Check(header);
}

// --- events in, effects out -----------------------------------------------------------------------------------------

LayerDriver::Tasks LayerDriver::FeedLocked(const LayerEvent& event, StagedContribution* payload) {
  MutexLock lock(mu_);
  return Feed(event, payload);
}

LayerDriver::Tasks LayerDriver::Feed(const LayerEvent& event, StagedContribution* payload) {
  Tasks tasks;
  for (Effect& effect : machine_.Step(event)) {
    Prepare(tasks.emplace_back(Task{.effect = std::move(effect)}), payload);
  }
  const int64_t in_flight = machine_.in_flight();
  if (in_flight != in_flight_) {
    session_->shard->in_flight.fetch_add(in_flight - std::exchange(in_flight_, in_flight), std::memory_order_relaxed);
  }
  return tasks;
}

const std::shared_ptr<StepData>& LayerDriver::DataOf(StepId id) {
  std::shared_ptr<StepData>& data = steps_[id];
  if (data == nullptr) {
    const SessionSpec& spec = session_->spec;
    const uint32_t world_size = static_cast<uint32_t>(spec.world_size);
    const bool delegate = spec.exchange == ExchangeMode::kDelegate;
    data = std::make_shared<StepData>(
        StepPayloads(0, world_size),
        StepPayloads(delegate ? static_cast<uint32_t>(DelegateRank(spec, layer_)) : 0, delegate ? 1 : world_size));
  }
  return data;
}

void LayerDriver::Prepare(Task& task, StagedContribution* payload) {
  const auto payloads_of = [](StepData& data, ContributionKind kind) -> StepPayloads& {
    return kind == ContributionKind::kStatistics ? data.statistics : data.gradients;
  };
  if (const auto* duplicate = std::get_if<precondor::Acknowledge>(&task.effect)) {
    if (duplicate->duplicate) ++stats_.duplicates;
  } else if (const auto* accepted = std::get_if<CountAccepted>(&task.effect)) {
    stats_.accepted += accepted->accepted;
    RaiseTo(session_->last_step, accepted->step);
    if (accepted->mode == Mode::kFirstOrder) RaiseTo(session_->after_last_first_order, accepted->step + 1);
  } else if (const auto* sealed = std::get_if<ReportSealed>(&task.effect)) {
    stats_.last_sealed_step = std::max(stats_.last_sealed_step, sealed->step);
  } else if (const auto* keep = std::get_if<KeepPayload>(&task.effect)) {
    payloads_of(*DataOf(keep->id), keep->kind).Put(keep->rank, std::move(*payload));
  } else if (const auto* drop = std::get_if<DropPayloads>(&task.effect)) {
    payloads_of(*DataOf(drop->id), drop->kind).Clear();
  } else if (const auto* give = std::get_if<GiveAnswer>(&task.effect)) {
    task.data = DataOf(give->id);
    task.answer = task.data->answer;
    task.requests = std::exchange(task.data->requests, {});
  } else if (const auto* await = std::get_if<AwaitAnswer>(&task.effect)) {
    task.data = DataOf(await->id);
  } else if (const auto* end = std::get_if<EndRequests>(&task.effect)) {
    const auto found = steps_.find(end->id);
    if (found == steps_.end()) return;
    task.requests = std::exchange(found->second->requests, {});
    if (end->retired) task.answer = std::exchange(found->second->answer, std::nullopt);
  } else if (const auto* dropped = std::get_if<DropStep>(&task.effect)) {
    const auto found = steps_.find(dropped->id);
    if (found == steps_.end()) return;
    task.data = std::move(found->second);  // the memory is given back when the lock is not held any more
    steps_.erase(found);
  } else if (const auto* accumulate = std::get_if<AccumulateGradient>(&task.effect)) {
    task.data = DataOf(accumulate->id);
    task.contributions = task.data->gradients.Take({accumulate->rank});
  } else if (const auto* apply = std::get_if<ApplyUpdate>(&task.effect)) {
    task.data = DataOf(apply->id);
    task.contributions =
        apply->logged ? *std::exchange(task.data->logged, std::nullopt) : task.data->statistics.Take(apply->ranks);
  } else if (const auto* compute = std::get_if<ComputeAnswer>(&task.effect)) {
    task.data = DataOf(compute->id);
    task.contributions = task.data->gradients.Take(compute->ranks);
  }
}

// --- contributions --------------------------------------------------------------------------------------------------

void LayerDriver::Acknowledge(ContributionKind kind, int64_t bytes, absl::StatusOr<bool> taken, const AckFn& ack) {
  Observer& observer = session_->shard->observer;
  const std::string& name = session_->spec.name;
  if (!taken.ok()) {
    observer.OnRejected(name, kind, GetErrorReason(taken.status()));
    MutexLock lock(mu_);
    ++stats_.rejected;
  } else if (*taken) {
    observer.OnDuplicate(name, kind);
  } else {
    observer.OnContribution(name, kind, bytes);
  }
  ack(std::move(taken));
}

void LayerDriver::SubmitStatistics(const ContributionHeader& header, Payload payload, const AckFn& ack) {
  const uint64_t digest = Digest(header, payload, /*device_plane=*/false);
  const int64_t bytes = static_cast<int64_t>(payload.size());
  StagedContribution contribution{.samples = header.samples};
  ContributionStatus status = ContributionStatus::kAbstained;
  absl::Status refusal;
  if (!header.abstain) {
    refusal = CheckStatistics(session_->spec, header, payload, session_->shard->options.max_norm_per_sqrt_element);
    status = refusal.ok() ? ContributionStatus::kPresent : ContributionStatus::kRefused;
    contribution.scales = {header.tensors[0].scale, header.tensors[1].scale};
    contribution.rows = RowsOf(session_->spec, header);
    contribution.bytes = std::move(payload);
  }
  Submit(header, status, digest, std::move(contribution), bytes, refusal, ack, /*result=*/nullptr);
}

void LayerDriver::SubmitGradient(const ContributionHeader& header, Payload payload, const AckFn& ack, ResultFn result) {
  const uint64_t digest = Digest(header, payload, session_->shard->options.device_plane);
  const int64_t bytes = header.on_device == nullptr ? static_cast<int64_t>(payload.size()) : header.on_device->bytes();
  StagedContribution contribution{.samples = header.samples};
  ContributionStatus status = ContributionStatus::kAbstained;
  absl::Status refusal;
  if (header.kind == ContributionKind::kPull) {
    status = ContributionStatus::kPresent;
  } else if (!header.abstain) {
    refusal = CheckGradient(session_->spec, header, payload);
    status = refusal.ok() ? ContributionStatus::kPresent : ContributionStatus::kRefused;
    contribution.scales[0] = header.tensors[0].scale;
    contribution.bytes = std::move(payload);
    contribution.on_device = header.on_device;
  }
  Submit(header, status, digest, std::move(contribution), bytes, refusal, ack, std::move(result));
}

void LayerDriver::Submit(const ContributionHeader& header, ContributionStatus status, uint64_t digest,
                         StagedContribution contribution, int64_t bytes, const absl::Status& refusal, const AckFn& ack,
                         ResultFn result) {
  const ContributionArrived event{.key = header.key,
                                  .kind = header.kind,
                                  .mode = header.mode,
                                  .status = status,
                                  .digest = digest,
                                  .now = session_->shard->clock.Now()};
  Tasks tasks = FeedLocked(event, &contribution);
  absl::StatusOr<bool> taken = OutcomeOf(tasks.front().effect);
  // A gradient that is refused when it first comes is told, when it comes again, what became of the step.
  const bool repeats_gradient = result != nullptr && taken.ok() && *taken;
  if (taken.ok() && !refusal.ok() && !repeats_gradient) taken = refusal;
  const bool accepted = taken.ok();
  Acknowledge(header.kind, bytes, std::move(taken), ack);
  if (accepted && result != nullptr) RequestAnswer(header.key, std::move(result));
  Perform(std::move(tasks));
}

absl::Status LayerDriver::SubmitReduced(ReducedGradient gradient, ResultFn result) {
  AverageArrived event{.key = {.session_id = gradient.session_id,
                               .epoch = gradient.epoch,
                               .step = gradient.step,
                               .layer = gradient.layer},
                       .mode = gradient.mode,
                       .statuses = {},
                       .now = session_->shard->clock.Now()};
  for (const ReducedGradient::Share& share : gradient.shares) event.statuses.push_back(StatusOf(share));
  const int64_t bytes = static_cast<int64_t>(gradient.average.size());
  StagedContribution average{.samples = SamplesOf(gradient), .bytes = std::move(gradient.average), .whole = true};
  Tasks tasks = FeedLocked(event, &average);
  absl::Status status = OutcomeOf(tasks.front().effect).status();
  if (status.ok()) {
    for (const ContributionStatus share : event.statuses) {
      session_->shard->observer.OnContribution(session_->spec.name, ContributionKind::kGradient,
                                               share == ContributionStatus::kPresent ? bytes : 0);
    }
    RequestAnswer(event.key, std::move(result));
  }
  Perform(std::move(tasks));
  return status;
}

void LayerDriver::RequestAnswer(const ContributionKey& key, ResultFn result) {
  absl::StatusOr<GradientResult> answer = absl::UnknownError("");
  {
    MutexLock lock(mu_);
    const Task task = std::move(Feed(AnswerRequested{key}).front());
    if (std::holds_alternative<AwaitAnswer>(task.effect)) {
      task.data->requests.push_back(std::move(result));
      return;
    }
    if (const auto* refuse = std::get_if<Refuse>(&task.effect)) {
      answer = refuse->status;
    } else {
      answer = *task.answer;
    }
  }
  if (answer.ok()) {
    session_->shard->observer.OnResult(session_->spec.name, answer->decision, answer->payload_bytes());
  }
  result(std::move(answer));
}

void LayerDriver::SealOverdue(absl::Time now) { Perform(FeedLocked(DeadlinePassed{now})); }

void LayerDriver::AddStragglers(absl::Time since, Stragglers& stragglers) const {
  MutexLock lock(mu_);
  machine_.AddStragglers(since, stragglers);
}

LayerStats LayerDriver::stats() const {
  MutexLock lock(mu_);
  return stats_;
}

// --- ranks and epochs -----------------------------------------------------------------------------------------------

absl::Status LayerDriver::Resume(const ContributionKey& key, uint64_t factor_version) {
  Tasks tasks =
      FeedLocked(RankResumed{.key = key, .factor_version = factor_version, .now = session_->shard->clock.Now()});
  absl::Status status;
  if (!tasks.empty()) {
    if (const auto* refuse = std::get_if<Refuse>(&tasks.front().effect)) status = refuse->status;
  }
  Perform(std::move(tasks));
  return status;
}

void LayerDriver::Fetch(const ContributionKey& key, ResultFn result) {
  Tasks tasks = FeedLocked(FactorsRequested{.key = key, .now = session_->shard->clock.Now()});
  const Effect outcome = tasks.back().effect;
  Perform(std::move(tasks));
  if (const auto* refuse = std::get_if<Refuse>(&outcome)) return result(refuse->status);
  session_->shard->in_flight.fetch_add(1, std::memory_order_relaxed);
  executor_.Post(strand_, [self = shared_from_this(), answer = std::move(result)] {
    ShardContext& shard = *self->session_->shard;
    self->ApplyPendingUpdates();
    absl::StatusOr<GradientResult> fetched = self->worker_.Fetch();
    if (fetched.ok()) {
      const int64_t bytes = fetched->bytes == nullptr ? 0 : static_cast<int64_t>(fetched->bytes->size());
      shard.observer.OnFetch(self->session_->spec.name, bytes);
    }
    answer(std::move(fetched));
    shard.in_flight.fetch_sub(1, std::memory_order_relaxed);
  });
}

uint64_t LayerDriver::EndEpoch(uint64_t epoch, const absl::Status& why) {
  uint64_t first_kept = 0;
  Tasks tasks;
  {
    MutexLock lock(mu_);
    first_kept = machine_.first_kept();
    tasks = Feed(EpochEnded{.epoch = epoch, .why = why});
  }
  Perform(std::move(tasks));
  return first_kept;
}

void LayerDriver::BeginEpoch(uint64_t epoch, std::optional<uint64_t> rollback_step, absl::Span<const Member> replaced) {
  Perform(FeedLocked(
      EpochBegan{.epoch = epoch, .rollback_step = rollback_step, .replaced = {replaced.begin(), replaced.end()}}));
}

void LayerDriver::Close(const absl::Status& why) { Perform(FeedLocked(Closed{why})); }

}  // namespace precondor

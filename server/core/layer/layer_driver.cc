// SPDX-License-Identifier: Apache-2.0
// Feeds events to the layer's machine and carries out its effects; ranks and epochs. layer_push.cc handles statistics,
// layer_pull.cc gradients and their answers, layer_factors.cc changes of the factors, layer_driver_replay.cc the
// replay.
#include "server/core/layer/layer_driver.h"

#include <algorithm>
#include <utility>

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

LayerRules RulesOf(const SessionContext& session, uint32_t layer) {
  const ShardOptions& options = session.shard->options;
  return {.spec = &session.spec,
          .layer = layer,
          .needs_statistics = session.methods.of(layer).needs_statistics(),
          .window_steps = static_cast<uint64_t>(options.window_steps)};
}

template <typename... Functions>
struct Overload : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overload(Functions...) -> Overload<Functions...>;

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
      strand_(executor_.NewStrandOf(session_->session_id)),
      worker_(*session_, layer, std::move(state)),
      journal_(*session_, layer, install.rollback_epoch),
      machine_(RulesOf(*session_, layer), install.epoch, install.rollback_epoch, install.members),
      counters_(layer, session_->spec.layers[layer].name, session_->DeviceOf(layer).place) {
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
    if (duplicate->duplicate) counters_.CountDuplicate();
  } else if (const auto* accepted = std::get_if<CountAccepted>(&task.effect)) {
    counters_.CountAccepted(accepted->accepted);
    session_->begun_steps.Begin(machine_.rollback_epoch(), accepted->step, accepted->mode);
  } else if (const auto* sealed = std::get_if<ReportSealed>(&task.effect)) {
    counters_.CountSealed(sealed->step);
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
    task.data = std::move(found->second);  // freed after the lock is released
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

void LayerDriver::Run() {
  for (;;) {
    Tasks tasks = FeedLocked(WorkerReady{});
    if (tasks.empty()) return;
    Perform(std::move(tasks));
  }
}

void LayerDriver::Perform(Tasks tasks) {
  const std::string& job = session_->spec.name;
  const std::string& layer = session_->spec.layers[layer_].name;
  ShardContext& shard = *session_->shard;
  for (size_t i = 0; i < tasks.size(); ++i) {
    Task& task = tasks[i];
    std::visit(
        Overload{
            [&](const ReportSealed& effect) { shard.layer_observer.OnSealed(job, effect.kind, effect.open_for); },
            [&](const ReportUpdatesLost& effect) {
              session_->updates_lost.fetch_add(effect.newly, std::memory_order_relaxed);
              shard.layer_observer.OnUpdatesLost(job, static_cast<int64_t>(effect.newly));
              shard.logger.Log(Severity::kWarning, "factor updates are lost",
                               {{"session", job},
                                {"layer", layer},
                                {"rank", effect.rank},
                                {"updates", effect.lost},
                                {"answered_with", effect.answered_with},
                                {"has", effect.known}});
            },
            [&](const ReportContradiction& effect) {
              shard.logger.Log(Severity::kError, "an answer cannot be repeated",
                               {{"reason", absl::string_view(effect.why.message())}});
            },
            [&](const EndRequests& effect) {
              for (AnswerRequest& request : task.requests) request.result(effect.status);
            },
            [&](const WakeWorker&) {
              const bool sealed = std::any_of(tasks.begin(), tasks.end(), [](const Task& other) {
                return std::holds_alternative<ReportSealed>(other.effect);
              });
              auto expected =
                  sealed ? std::make_shared<Backend::ExpectedTask>(session_->DeviceOf(layer_).backend) : nullptr;
              executor_.Post(strand_, [self = shared_from_this(), expected = std::move(expected)]() mutable {
                self->worker_.Expect(std::move(expected));
                self->Run();
                self->worker_.Expect(nullptr);
              });
            },
            [&](const BeginStep& effect) { journal_.BeginStep(effect.rollback_epoch, effect.step, worker_); },
            [&](const AccumulateGradient&) { worker_.Accumulate(*task.data, std::move(task.contributions.front())); },
            // tasks[i + 1] is the ApplyUpdate of this record.
            [&](const AppendUpdate& effect) {
              journal_.BeforeUpdate(effect.step, worker_, tasks[i + 1].contributions, effect.logged);
            },
            [&](const ApplyUpdate& effect) { Update(effect, task); },
            [&](const AppendFailedUpdate& effect) { journal_.AfterFailedUpdate(effect.step); },
            [&](const ComputeAnswer& effect) { Answer(effect, task); },
            [&](const AppendPlan& effect) { journal_.BeforeAnswer(effect.step, effect.mode, effect.plan); },
            [&](const DeliverAnswer& effect) { Deliver(effect.id); },
            // Prepare, or the caller that fed the event, has carried out the others.
            [](const auto&) {}},
        task.effect);
  }
}

void LayerDriver::ShowFactors() {
  const LayerWorker::StateView view = worker_.view();
  MutexLock lock(mu_);
  counters_.Show(view);
  Feed(FactorsReplaced{.held = view.held, .factor_version = view.version});
}

void LayerDriver::GiveFinalImage(uint64_t step, std::function<void()> done) {
  executor_.Post(strand_, [self = shared_from_this(), step, done = std::move(done)] {
    self->ApplyPendingUpdates();
    self->journal_.GiveFinalImage(step, self->worker_);
    done();
  });
}

// --- stragglers and counters -----------------------------------------------------------------------------------------

void LayerDriver::AddStragglers(absl::Time since, Stragglers& stragglers) const {
  MutexLock lock(mu_);
  machine_.AddStragglers(since, stragglers);
}

std::set<uint32_t> LayerDriver::MissingRanks(uint64_t step) const {
  MutexLock lock(mu_);
  return machine_.MissingRanks(step);
}

LayerStats LayerDriver::stats() const {
  MutexLock lock(mu_);
  return counters_.stats();
}

// --- ranks and epochs -----------------------------------------------------------------------------------------------

absl::StatusOr<uint64_t> LayerDriver::Resume(const RankResume& resume) {
  Tasks tasks = FeedLocked(RankResumed{resume, session_->shard->clock.Now()});
  absl::StatusOr<uint64_t> lost = 0;
  for (const Task& task : tasks) {
    if (const auto* refuse = std::get_if<Refuse>(&task.effect)) lost = refuse->status;
    if (const auto* report = std::get_if<ReportUpdatesLost>(&task.effect); report != nullptr && lost.ok()) {
      lost = report->lost;
    }
  }
  Perform(std::move(tasks));
  return lost;
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

void LayerDriver::BeginEpoch(const EpochBegan& began) { Perform(FeedLocked(began)); }

void LayerDriver::Close(const absl::Status& why) { Perform(FeedLocked(Closed{why})); }

}  // namespace precondor

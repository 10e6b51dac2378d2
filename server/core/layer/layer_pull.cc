// SPDX-License-Identifier: Apache-2.0
// What happens to a gradient, or to a pull in its place. The calling thread stages it, files it in the machine and
// acknowledges it, and its sender waits for the step's answer. When the machine has sealed the gradients and the
// factors are those of the step, the layer's strand makes the answer once. When the journal has the answer's plan, all
// requests that wait get the answer.
#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/core/layer/layer_driver.h"
#include "server/core/layer/payload.h"
#include "server/core/resources/reservation.h"

namespace precondor {

void LayerDriver::SubmitGradient(AdmittedContribution contribution, Payload payload, const AckFn& ack,
                                 ResultFn result) {
  const ContributionHeader& header = contribution.header();
  Staged staged{.digest = Digest(header, payload, !session_->shard->options.ring_device.empty()),
                .bytes = static_cast<int64_t>(contribution.payload_bytes()),
                .contribution = {.samples = header.samples}};
  if (header.kind == ContributionKind::kPull) {
    staged.status = ContributionStatus::kPresent;
  } else if (!header.abstain) {
    staged.refusal =
        CheckGradient(session_->spec, header, payload, session_->methods.of(layer_).traits().max_gradient_norm());
    staged.status = staged.refusal.ok() ? ContributionStatus::kPresent : ContributionStatus::kRefused;
    staged.contribution.scales[0] = header.tensors.empty() ? 1.0f : header.tensors[0].scale;
    staged.contribution.bytes = std::move(payload);
    std::copy_if(header.parts.begin(), header.parts.end(), std::back_inserter(staged.contribution.parts),
                 [](const GradientPart& part) { return part.sent; });
    staged.contribution.on_device = header.on_device;
  }
  Filed filed = FileContribution(contribution, staged);
  // A refused gradient gets its error when it first arrives, and the step's answer when it is repeated.
  const bool repeats = filed.taken.ok() && *filed.taken;
  if (filed.taken.ok() && !staged.refusal.ok() && !repeats) filed.taken = staged.refusal;
  const bool accepted = filed.taken.ok();
  Acknowledge(header.kind, staged.bytes, std::move(filed.taken), ack);
  if (accepted) {
    RequestAnswer(header.key, {.rank = header.key.rank, .result = std::move(result), .parts = header.parts});
  }
  Perform(std::move(filed.tasks));
}

void LayerDriver::RequestAnswer(const ContributionKey& key, AnswerRequest request) {
  Task task;
  {
    MutexLock lock(mu_);
    task = std::move(Feed(AnswerRequested{key}).front());
    if (std::holds_alternative<AwaitAnswer>(task.effect)) {
      const auto ranks = static_cast<size_t>(GradientContributors(session_->spec));
      std::optional<AnswerRequest> oldest = task.data->AddRequest(std::move(request), ranks);
      if (!oldest.has_value()) return;
      request = *std::move(oldest);
      task.effect = Refuse{ReasonedStatus(
          absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
          absl::StrCat(DescribeKey(session_->spec, key), ": expected at most ", StepData::kMostRequests,
                       " requests of a rank that wait for one answer, got one more; this is the oldest"))};
    }
  }
  if (const auto* refuse = std::get_if<Refuse>(&task.effect)) return request.result(refuse->status);
  request.result(AnswerFor(request, *task.answer, *task.data));
}

absl::StatusOr<GradientResult> LayerDriver::AnswerFor(const AnswerRequest& request, const GradientResult& answer,
                                                      StepData& data) {
  const bool sharded = session_->spec.exchange == ExchangeMode::kSharded;
  absl::StatusOr<GradientResult> own = sharded ? data.answer_parts.Cut(spec(), request.parts, answer) : answer;
  if (own.ok()) {
    session_->shard->layer_observer.OnResult(session_->spec.name, own->decision, own->payload_bytes());
  }
  return own;
}

// Runs on the strand when the step has its turn.
void LayerDriver::Answer(const ComputeAnswer& effect, Task& task) {
  StepData& data = *task.data;
  data.mode = effect.mode;
  data.plan = effect.plan;
  const bool plan_holds = !data.plan.has_value() || !worker_.LacksGradientsOf(*data.plan);
  if (!plan_holds) data.plan.reset();
  const bool skipped = data.plan.has_value() && data.plan->decision == Decision::kSkip;
  const std::string& skip_reason = skipped ? data.plan->reason : effect.skip_reason;
  LayerWorker::Answer answer;
  if (WorkersPrecondition(session_->spec)) {
    answer = worker_.PublishUpdate(data);
  } else if (!skip_reason.empty()) {
    answer = worker_.Skip(data, skipped ? AnswerCause::kRecovered : AnswerCause::kAbstained, skip_reason);
  } else {
    worker_.Average(data, std::move(task.contributions));
    // The record must be in the journal before the factors change: ranks may learn of the answer right afterwards.
    if (worker_.LearnsFrom(data)) journal_.BeforeGradient(effect.step, worker_, data);
    answer = worker_.Precondition(data);
  }
  if (answer.preconditioned) session_->shard->layer_observer.OnPrecondition(session_->spec.name, answer.took);
  answer.result.took.update = data.update_took;
  if (answer.preconditioned) answer.result.took.precondition = answer.took;
  const GradientResult& result = answer.result;
  Tasks tasks;
  {
    MutexLock lock(mu_);
    counters_.Show(answer.state);
    tasks = Feed(AnswerDone{
        .id = effect.id,
        .plan = {.decision = result.decision, .factor_version = result.factor_version, .reason = result.reason},
        .plan_holds = plan_holds,
        .held = answer.state.held,
        .factor_version = answer.state.version});
    const bool delivers = std::any_of(tasks.begin(), tasks.end(), [](const Task& next) {
      return std::holds_alternative<DeliverAnswer>(next.effect);
    });
    if (delivers) {
      counters_.CountAnswer(answer);
      session_->shard->layer_observer.OnPlan(result.decision, result.cause);
    }
    data.answer = std::move(answer.result);
  }
  Perform(std::move(tasks));
}

void LayerDriver::Deliver(StepId id) {
  const std::string& job = session_->spec.name;
  ShardContext& shard = *session_->shard;
  for (Task& task : FeedLocked(AnswerVisible{id})) {
    const GradientResult& result = *task.answer;
    const bool skipped = result.decision == Decision::kSkip;
    if (skipped || (result.decision == Decision::kIdentity && result.cause == AnswerCause::kFailed)) {
      // The others are in precondor_plans_total: a layer that no rank uses is skipped in each step.
      const bool told = result.cause == AnswerCause::kAbstained && told_of_skip_.exchange(true);
      shard.logger.Log(told ? Severity::kInfo : Severity::kWarning,
                       skipped ? "step skipped" : "gradient not preconditioned",
                       {{"session", job},
                        {"step", std::get<GiveAnswer>(task.effect).step},
                        {"layer", session_->spec.layers[layer_].name},
                        {"reason", result.reason}});
    }
    for (AnswerRequest& request : task.requests) request.result(AnswerFor(request, result, *task.data));
  }
  // This must be last: a drain that sees nothing in flight may close the streams that the requests write to.
  FeedLocked(AnswerDelivered{});
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
    // The update of a step that was acknowledged a moment ago may not have been posted yet.
    if (!WorkersPrecondition(self->session_->spec)) self->Run();
    absl::StatusOr<GradientResult> fetched = self->worker_.Fetch();
    if (fetched.ok()) {
      const int64_t bytes = fetched->bytes == nullptr ? 0 : static_cast<int64_t>(fetched->bytes->size());
      shard.layer_observer.OnFetch(self->session_->spec.name, bytes);
    }
    answer(std::move(fetched));
    shard.in_flight.fetch_sub(1, std::memory_order_relaxed);
  });
}

}  // namespace precondor

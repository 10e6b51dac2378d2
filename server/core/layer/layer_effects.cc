// SPDX-License-Identifier: Apache-2.0
// The one place where the effects of a layer's machine are carried out. Each function has all of one effect: first what
// belongs to the machine's decision, under the layer's lock, then, in `Then`, what runs after it.
#include <optional>
#include <utility>
#include <vector>

#include "kernels/base/error_reason.h"
#include "server/core/layer/admission.h"
#include "server/core/layer/layer_driver.h"
#include "server/core/resources/reservation.h"

namespace precondor {

// Carries out the effects of one event of `layer`, whose lock is held.
class LayerDriver::EffectVisitor {
 public:
  EffectVisitor(LayerDriver& layer, StepTable& steps, LayerCounters& counters, uint64_t rollback_epoch, Sender& sender,
                Rest& rest)
      : layer_(layer),
        steps_(steps),
        counters_(counters),
        rollback_epoch_(rollback_epoch),
        sender_(sender),
        rest_(rest) {}

  // --- replies and requests -----------------------------------------------------------------------------------------

  void operator()(SenderReply& reply) {
    if (reply.duplicate) counters_.CountDuplicate();
    sender_.outcome = std::move(reply);
    Then([&sender = sender_] { sender.reply(sender.outcome); });
  }
  void operator()(const AwaitAnswer& await) {
    const SessionSpec& spec = layer_.session_->spec;
    std::optional<AnswerRequest> oldest =
        steps_.Of(await.id)->AddRequest(std::move(*sender_.request), static_cast<size_t>(GradientContributors(spec)));
    if (!oldest.has_value()) return;
    Then([&spec, request = *std::move(oldest)] {
      request.result(ReasonedStatus(
          absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
          absl::StrCat(DescribeKey(spec, request.key), ": expected at most ", StepData::kMostRequests,
                       " requests of a rank that wait for one answer, got one more; this is the oldest")));
    });
  }
  void operator()(const GiveAnswer& give) {
    const std::shared_ptr<StepData>& data = steps_.Of(give.id);
    std::vector<AnswerRequest> requests = std::exchange(data->requests, {});
    const bool first = sender_.request == nullptr;
    if (!first) requests.push_back(std::move(*sender_.request));
    Then([&layer = layer_, data, answer = *data->answer, requests = std::move(requests), first,
          step = give.step]() mutable {
      if (first) layer.LogAnswer(step, answer);
      layer.Give(answer, requests, *data);
    });
  }
  void operator()(const FetchFactors&) {
    Then([&layer = layer_, &sender = sender_] { layer.PostFetch(std::move(sender.request->result)); });
  }
  void operator()(EndRequests& end) {
    StepData* const data = steps_.Find(end.id);
    if (data == nullptr) return;
    Then([requests = std::exchange(data->requests, {}), status = std::move(end.status),
          answer = end.retired ? std::exchange(data->answer, std::nullopt) : std::nullopt] {
      for (const AnswerRequest& request : requests) request.result(status);
    });
  }

  // --- payloads -----------------------------------------------------------------------------------------------------

  void operator()(const CountAccepted& accepted) {
    counters_.CountAccepted(accepted.accepted);
    layer_.session_->begun_steps.Begin(rollback_epoch_, accepted.step, accepted.mode);
  }
  void operator()(const KeepPayload& keep) {
    steps_.Of(keep.id)->payloads(keep.kind).Put(keep.rank, std::move(*sender_.payload));
  }
  void operator()(const DropPayloads& drop) { steps_.Of(drop.id)->payloads(drop.kind).Clear(); }
  void operator()(const DropStep& drop) {
    Then([data = steps_.Remove(drop.id)] {});  // frees it
  }

  // --- reports ------------------------------------------------------------------------------------------------------

  void operator()(const ReportSealed& sealed) {
    counters_.CountSealed(sealed.step);
    Then([&layer = layer_, sealed] {
      layer.session_->shard->layer_observer.OnSealed(layer.session_->spec.name, sealed.kind, sealed.open_for);
    });
  }
  void operator()(const ReportUpdatesLost& report) {
    *sender_.updates_lost = report.lost;
    Then([&session = *layer_.session_, &layer = layer_.spec().name, report] {
      session.updates_lost.fetch_add(report.newly, std::memory_order_relaxed);
      session.shard->layer_observer.OnUpdatesLost(session.spec.name, static_cast<int64_t>(report.newly));
      session.shard->logger.Log(Severity::kWarning, "factor updates are lost",
                                {{"session", session.spec.name},
                                 {"layer", layer},
                                 {"rank", report.rank},
                                 {"updates", report.lost},
                                 {"answered_with", report.answered_with},
                                 {"has", report.known}});
    });
  }
  void operator()(const ReportContradiction& report) {
    Then([&logger = layer_.session_->shard->logger, why = report.why] {
      logger.Log(Severity::kError, "an answer cannot be repeated", {{"reason", absl::string_view(why.message())}});
    });
  }

  // --- the worker ---------------------------------------------------------------------------------------------------

  void operator()(const WakeWorker& wake) {
    Then([&layer = layer_, sealed = wake.sealed] {
      Backend& backend = layer.session_->shard->backend;
      auto expected = sealed ? std::make_shared<Backend::ExpectedTask>(backend) : nullptr;
      layer.executor_.Post(layer.strand_, [self = layer.shared_from_this(), expected = std::move(expected)]() mutable {
        self->worker_.Expect(std::move(expected));
        self->Run();
        self->worker_.Expect(nullptr);
      });
    });
  }
  void operator()(const BeginStep& begin) {
    Then([&layer = layer_, begin] { layer.journal_.BeginStep(begin.rollback_epoch, begin.step, layer.worker_); });
  }
  void operator()(const AccumulateGradient& accumulate) {
    const std::shared_ptr<StepData>& data = steps_.Of(accumulate.id);
    Then([&layer = layer_, data, gradient = data->gradients.Take(accumulate.rank)]() mutable {
      layer.worker_.Accumulate(*data, std::move(gradient));
    });
  }
  void operator()(const AppendUpdate& append) {
    const std::shared_ptr<StepData>& data = steps_.Of(append.id);
    if (!append.logged) data->due = data->statistics.Take(append.ranks);
    Then([&layer = layer_, data, step = append.step, logged = append.logged] {
      layer.journal_.BeforeUpdate(step, layer.worker_, data->due, logged);
    });
  }
  void operator()(const ApplyUpdate& apply) {
    Then([&layer = layer_, data = steps_.Of(apply.id), apply] { layer.Update(apply, *data); });
  }
  void operator()(const AppendFailedUpdate& append) {
    Then([&layer = layer_, step = append.step] { layer.journal_.AfterFailedUpdate(step); });
  }
  void operator()(ComputeAnswer& compute) {
    const std::shared_ptr<StepData>& data = steps_.Of(compute.id);
    auto contributions = data->gradients.Take(compute.ranks);
    Then([&layer = layer_, data, contributions = std::move(contributions), compute = std::move(compute)]() mutable {
      layer.Answer(compute, *data, std::move(contributions));
    });
  }
  void operator()(AppendPlan& append) {
    Then([&layer = layer_, append = std::move(append)] {
      layer.journal_.BeforeAnswer(append.step, append.mode, append.plan);
    });
  }
  void operator()(const DeliverAnswer& deliver) {
    const GradientResult& answer = *steps_.Of(deliver.id)->answer;
    counters_.CountAnswer(answer);
    layer_.session_->shard->layer_observer.OnPlan(answer.decision, answer.cause);
    Then([&layer = layer_, id = deliver.id] {
      layer.Feed(AnswerVisible{id});
      // This must be last: a drain that sees nothing in flight may close the streams that the requests write to.
      layer.Feed(AnswerDelivered{});
    });
  }

 private:
  void Then(absl::AnyInvocable<void()> call) { rest_.calls.push_back(std::move(call)); }

  LayerDriver& layer_;
  StepTable& steps_;
  LayerCounters& counters_;
  const uint64_t rollback_epoch_;
  Sender& sender_;
  Rest& rest_;
};

LayerDriver::Rest LayerDriver::Begin(const LayerEvent& event, Sender& sender) {
  Effects effects = machine_.Step(event);
  Rest rest{.any_effect = !effects.empty()};
  EffectVisitor visitor(*this, steps_, counters_, machine_.rollback_epoch(), sender, rest);
  for (Effect& effect : effects) std::visit(visitor, effect);
  const int64_t in_flight = machine_.in_flight();
  if (in_flight != in_flight_) {
    session_->shard->in_flight.fetch_add(in_flight - std::exchange(in_flight_, in_flight), std::memory_order_relaxed);
  }
  return rest;
}

bool LayerDriver::Finish(Rest& rest) {
  for (absl::AnyInvocable<void()>& call : rest.calls) call();
  return rest.any_effect;
}

bool LayerDriver::Feed(const LayerEvent& event, Sender sender) {
  Rest rest;
  {
    MutexLock lock(mu_);
    rest = Begin(event, sender);
  }
  return Finish(rest);
}

}  // namespace precondor

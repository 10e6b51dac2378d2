// SPDX-License-Identifier: Apache-2.0
// The worker's side of LayerMachine: chooses the next work and takes in its results.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/core/layer/layer_machine.h"

namespace precondor {

// --- the next work --------------------------------------------------------------------------------------------------

void LayerMachine::On(const WorkerReady&, Effects& effects) {
  if (std::vector<WindowStep>& owed = window_.owed_updates(); !owed.empty()) {
    OfferPendingUpdate(owed.front(), effects);
    owed.erase(owed.begin());
    return;
  }
  if (OfferAccumulation(effects)) return;
  for (auto& [step, of] : window_.steps()) {
    for (const bool gradient : {false, true}) {
      const Offer offer = gradient ? OfferAnswer(of, effects) : OfferUpdate(of, effects);
      if (offer == Offer::kWork) return;
      if (offer == Offer::kBlocked) {
        awake_ = false;
        return;
      }
    }
  }
  awake_ = false;
}

// Gradients are added up without waiting for a turn, which frees their payloads early.
bool LayerMachine::OfferAccumulation(Effects& effects) {
  // A pull has no payload.
  if (rules_.workers_precondition()) return false;
  for (auto& [step, of] : window_.steps()) {
    Phase& phase = of.gradient;
    if (phase.state != PhaseState::kOpen || phase.contributions.abstained() > 0) continue;
    if (const std::optional<uint32_t> rank = phase.contributions.TakeNext()) {
      effects.push_back(AccumulateGradient{of.id, *rank});
      return true;
    }
  }
  return false;
}

void LayerMachine::OfferPendingUpdate(WindowStep& of, Effects& effects) {
  const bool restored = *std::exchange(of.pending_update, std::nullopt);
  effects.push_back(BeginStep{.step = of.step, .rollback_epoch = rollback_epoch_});
  effects.push_back(AppendUpdate{.id = of.id, .step = of.step, .logged = true});
  effects.push_back(ApplyUpdate{.id = of.id, .step = of.step, .ranks = {}, .logged = true, .restored = restored});
}

LayerMachine::Offer LayerMachine::OfferUpdate(WindowStep& of, Effects& effects) {
  Phase& phase = of.statistics;
  if (!rules_.ExpectsStatistics(of.step, of.mode)) return Offer::kNothing;
  if (phase.state == PhaseState::kOpen) return Offer::kBlocked;
  if (phase.state != PhaseState::kSealed) return Offer::kNothing;
  // A replaced rank may still fetch the factors from before this update, and an applied update cannot be undone.
  if (!of.restored && ranks_.IsAwaitedBefore(of.step)) return Offer::kBlocked;
  if (of.pending_update.has_value()) {
    OfferPendingUpdate(of, effects);
    return Offer::kWork;
  }
  std::vector<uint32_t> ranks;
  if (phase.skip) {
    effects.push_back(DropPayloads{of.id, ContributionKind::kStatistics});
  } else {
    ranks = phase.contributions.TakeRest();
  }
  effects.push_back(BeginStep{.step = of.step, .rollback_epoch = rollback_epoch_});
  effects.push_back(AppendUpdate{.id = of.id, .step = of.step, .logged = false});
  effects.push_back(ApplyUpdate{.id = of.id, .step = of.step, .ranks = std::move(ranks)});
  return Offer::kWork;
}

LayerMachine::Offer LayerMachine::OfferAnswer(WindowStep& of, Effects& effects) {
  Phase& phase = of.gradient;
  if (phase.state == PhaseState::kOpen && of.restored && window_.IsOvertaken(of)) {
    window_.RetireGradient(of, effects);
    return Offer::kWork;
  }
  if (of.incomplete && phase.state <= PhaseState::kSealed) {
    // The step's answer is lost, and the journal must not get another one in its place. Later steps do not wait for it.
    window_.RetireGradient(of, effects);
    return Offer::kWork;
  }
  if (phase.state == PhaseState::kOpen) return Offer::kBlocked;
  if (phase.state != PhaseState::kSealed) return Offer::kNothing;
  ComputeAnswer answer{.id = of.id, .step = of.step, .mode = of.mode, .ranks = {}, .skip_reason = {}, .plan = of.plan};
  if (phase.contributions.abstained() > 0) {
    answer.skip_reason = phase.contributions.DescribeAbstention();
  } else {
    answer.ranks = phase.contributions.TakeRest();
  }
  effects.push_back(BeginStep{.step = of.step, .rollback_epoch = rollback_epoch_});
  effects.push_back(std::move(answer));
  return Offer::kWork;
}

void LayerMachine::On(const FactorsNeeded&, Effects& effects) {
  for (WindowStep& of : std::exchange(window_.owed_updates(), {})) OfferPendingUpdate(of, effects);
  for (auto& [step, of] : window_.steps()) {
    if (of.pending_update.has_value() && of.statistics.state == PhaseState::kSealed) OfferPendingUpdate(of, effects);
  }
}

// --- results of work ------------------------------------------------------------------------------------------------

void LayerMachine::On(const UpdateDone& event, Effects& effects) {
  if (event.failed && !event.logged) effects.push_back(AppendFailedUpdate{event.step});
  factors_.held = event.held;
  factors_.version = event.factor_version;
  if (event.restored) --factors_.restored_updates;
  WindowStep* const of = window_.FindId(event.id);
  if (of == nullptr || of->statistics.state == PhaseState::kRetired) {  // the step was dropped meanwhile
    effects.push_back(DropStep{event.id});
    return;
  }
  window_.FinishUpdate(*of);
  // A step that has left the window was kept for this update alone.
  if (of->step >= window_.floor()) return;
  effects.push_back(DropStep{of->id});
  window_.steps().erase(of->step);
}

void LayerMachine::On(const AnswerDone& event, Effects& effects) {
  factors_.held = event.held;
  factors_.version = event.factor_version;
  WindowStep* const of = window_.FindId(event.id);
  if (of == nullptr || of->gradient.state != PhaseState::kSealed) return;  // dropped meanwhile
  const SessionSpec& spec = *rules_.spec;
  if (!event.plan_holds) of->plan.reset();
  if (!of->plan.has_value()) {
    effects.push_back(AppendPlan{.step = of->step, .mode = of->mode, .plan = event.plan});
  } else if (of->plan->decision != event.plan.decision || (of->plan->decision == Decision::kPreconditioned &&
                                                           of->plan->factor_version != event.plan.factor_version)) {
    absl::Status why = absl::InternalError(
        absl::StrCat("session \"", spec.name, "\" step ", of->step, " layer \"", spec.layers[rules_.layer].name,
                     "\": was answered ", DecisionName(of->plan->decision), " with factors ", of->plan->factor_version,
                     " before the shard came back, and can now only be ", DecisionName(event.plan.decision),
                     " with factors ", event.plan.factor_version, ": ", event.plan.reason));
    of->in_flight -= of->gradient.contributions.arrived();
    of->gradient.Advance(PhaseEvent::kRetire);
    effects.push_back(ReportContradiction{why});
    effects.push_back(EndRequests{.id = of->id, .status = std::move(why), .retired = true});
    return;
  }
  effects.push_back(DeliverAnswer{of->id});
}

void LayerMachine::On(const AnswerVisible& event, Effects& effects) {
  WindowStep* const of = window_.FindId(event.id);
  if (of == nullptr || of->gradient.state != PhaseState::kSealed) return;
  of->gradient.Advance(PhaseEvent::kApply);
  goes_on_at_.reset();
  ranks_.ForgetLacks();
  delivering_ = of->gradient.contributions.arrived();
  of->in_flight -= delivering_;
  effects.push_back(GiveAnswer{.id = of->id, .step = of->step});
}

void LayerMachine::On(const AnswerDelivered&, Effects&) { delivering_ = 0; }

void LayerMachine::On(const FactorsReplaced& event, Effects&) {
  factors_.held = event.held;
  factors_.version = event.factor_version;
}

void LayerMachine::On(const ReplayFinished& event, Effects& effects) {
  rollback_epoch_ = event.rollback_epoch;
  factors_.held = event.held;
  factors_.version = event.factor_version;
  bool work = false;
  for (const RestoredStep& restored : event.steps) {
    WindowStep& of = window_.Open(restored.step, restored.mode, effects);
    of.restored = true;
    of.plan = restored.plan;
    if (restored.updated) of.statistics.Advance(PhaseEvent::kSeal);
    if (restored.update_pending) {
      of.pending_update = !restored.update_is_empty;
      if (!restored.update_is_empty) ++factors_.restored_updates;
      ++of.in_flight;
      work = true;
    } else if (restored.updated) {
      of.statistics.Advance(PhaseEvent::kApply);
    }
    if (restored.answered) {
      of.gradient.contributions.PutAllRestored();
      of.gradient.Advance(PhaseEvent::kSeal);
      of.gradient.Advance(PhaseEvent::kApply);
    } else if (restored.passed) {
      window_.RetireGradient(of, effects);
    }
    work = CountRanksThatBeganLater(of, event.now, effects) || work;
  }
  if (work) Wake(effects);
}

}  // namespace precondor

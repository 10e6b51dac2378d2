// SPDX-License-Identifier: Apache-2.0
// Contributions, requests, epochs and the worker's side. layer_machine_ranks.cc handles ranks that are replaced or
// resume.
#include "server/core/layer/layer_machine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/layer/admission.h"

namespace precondor {

LayerMachine::LayerMachine(const LayerRules& rules, uint64_t epoch, uint64_t rollback_epoch,
                           absl::Span<const Member> members)
    : window_(rules), ranks_(rules.spec->world_size), epoch_(epoch), rollback_epoch_(rollback_epoch) {
  for (const Member& member : members) ranks_.Replace(member, rules.workers_precondition());
}

Effects LayerMachine::Step(const LayerEvent& event) {
  Effects effects;
  std::visit([&](const auto& of) { On(of, effects); }, event);
  return effects;
}

void LayerMachine::Wake(Effects& effects) {
  if (std::exchange(awake_, true)) return;
  const bool sealed = std::any_of(effects.begin(), effects.end(),
                                  [](const Effect& effect) { return std::holds_alternative<ReportSealed>(effect); });
  effects.push_back(WakeWorker{.sealed = sealed});
}

// --- checks ---------------------------------------------------------------------------------------------------------

absl::Status LayerMachine::CheckEpoch(const ContributionKey& key) const {
  if (key.epoch == epoch_) return absl::OkStatus();
  // The session's membership was replaced between its check of the contribution and this one.
  const bool ahead = key.epoch > epoch_;
  return ReasonedStatus(
      ahead ? absl::StatusCode::kUnavailable : absl::StatusCode::kFailedPrecondition,
      ahead ? ErrorReason::kFutureEpoch : ErrorReason::kStaleEpoch,
      absl::StrCat(DescribeKey(*rules().spec, key), ": expected epoch ", epoch_, ", got ", key.epoch));
}

absl::Status LayerMachine::CheckNotLost(const ContributionKey& key) const {
  const std::optional<uint32_t> first_lost = ranks_.first_lost();
  if (!first_lost.has_value()) return absl::OkStatus();
  if (!ranks_.IsLost(key.rank)) {
    return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                          absl::StrCat(DescribeKey(*rules().spec, key), ": rank ", *first_lost,
                                       " has to begin again: the shard has lost factors that it knows"));
  }
  return ReasonedStatus(absl::StatusCode::kDataLoss, ErrorReason::kStateLost,
                        absl::StrCat(DescribeKey(*rules().spec, key),
                                     ": the shard has lost factors that ranks have had answers with, and cannot give "
                                     "the others the same: go back to a checkpoint with all ranks, and join again"));
}

absl::Status LayerMachine::CheckStep(ContributionKind kind, const ContributionKey& key, Mode mode) const {
  PRECONDOR_RETURN_IF_ERROR(CheckNotLost(key));
  if (IsStale(kind, key)) return absl::OkStatus();
  return window_.Check(key, mode, ranks_.HasYetToBegin(key.rank) && rules().SendsGradient(key.rank));
}

absl::Status LayerMachine::AnswerIsLost(const WindowStep& of) const {
  return ReasonedStatus(
      absl::StatusCode::kDataLoss, ErrorReason::kStateLost,
      absl::StrCat("session \"", rules().spec->name, "\" layer \"", rules().spec->layers[rules().layer].name,
                   "\" step ", of.step,
                   ": a rank has gone on with factors that the shard has lost, and the others cannot get: go ",
                   "back to a checkpoint with all ranks, and join again"));
}

absl::Status LayerMachine::CheckParts(const ContributionArrived& event, const Phase& phase) const {
  const LayerSpec& layer = rules().spec->layers[rules().layer];
  const int64_t whole = layer.d_out * layer.d_in;
  if (phase.elements + event.elements <= whole) return absl::OkStatus();
  // Ranks that begin again may divide the gradient in another way: they skip the step that others had begun.
  if (phase.contributions.any_inherited()) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
      absl::StrCat(DescribeKey(*rules().spec, event.key), ": parts: expected at most ", whole - phase.elements,
                   " elements that other ranks have not sent, got ", event.elements));
}

bool LayerMachine::IsStale(ContributionKind kind, const ContributionKey& key) const {
  return kind == ContributionKind::kStatistics && key.step < window_.FirstToOpen() && window_.Find(key.step) == nullptr;
}

absl::Status LayerMachine::Check(const ContributionHeader& header) const {
  PRECONDOR_RETURN_IF_ERROR(CheckEpoch(header.key));
  if (AsksForLostAnswer(header.kind, header.key)) return absl::OkStatus();
  absl::Status status = CheckStep(header.kind, header.key, header.mode);
  // This rank may be the last one that is owed an answer. Taking in the contribution then marks the answer as received.
  return GetErrorReason(status) == ErrorReason::kNotActive ? absl::OkStatus() : status;
}

// --- contributions --------------------------------------------------------------------------------------------------

void LayerMachine::On(const ContributionArrived& event, Effects& effects) {
  if (absl::Status status = CheckEpoch(event.key); !status.ok()) {
    effects.push_back(SenderReply{.status = std::move(status)});
    return;
  }
  effects.push_back(SenderReply{});
  // This is done even if the contribution is then refused. Otherwise two ranks could wait for each other after steps
  // without a frame.
  ranks_.MarkHeard(event.key.rank);
  MarkAnswered(event.kind, event.key);
  bool work = NoteBegun(event.key, event.now, effects);
  work = NoteCatchup(event.key, event.now, effects) || work;
  const absl::StatusOr<bool> duplicate = Admit(event, work, effects);
  effects.front() = SenderReply{.status = duplicate.status(), .duplicate = duplicate.value_or(false)};
  if (work) Wake(effects);
}

absl::StatusOr<bool> LayerMachine::Admit(const ContributionArrived& event, bool& work, Effects& effects) {
  const ContributionKey& key = event.key;
  const bool is_gradient = event.kind != ContributionKind::kStatistics;
  if (AsksForLostAnswer(event.kind, key)) LoseRanks(key, effects);
  PRECONDOR_RETURN_IF_ERROR(CheckStep(event.kind, key, event.mode));
  if (IsStale(event.kind, key)) return true;
  // The method needs no statistics: acknowledge them without effect.
  if (!is_gradient && !rules().needs_statistics) return false;
  WindowStep& of = FindOrOpen(key.step, event.mode, event.now, effects);
  Phase& phase = of.phase(event.kind);
  // The contributors of a restored step have been counted, but what each rank sent is not known. Treat it as a
  // repetition.
  if (!is_gradient && of.restored && phase.state != PhaseState::kOpen) return true;
  if (is_gradient && of.incomplete) return AnswerIsLost(of);
  if (is_gradient && IsPassed(of)) return Passed(of);
  if (phase.state != PhaseState::kOpen && !phase.contributions.has(key.rank)) {
    return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                          absl::StrCat(DescribeKey(*rules().spec, key), ": retired without this rank"));
  }
  if (event.elements > 0 && !phase.contributions.has(key.rank)) PRECONDOR_RETURN_IF_ERROR(CheckParts(event, phase));
  switch (phase.contributions.Put(key.rank, event.status, event.digest)) {
    case PutOutcome::kDuplicate:
      return true;
    case PutOutcome::kConflict:
      return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kConflict,
                            absl::StrCat(DescribeKey(*rules().spec, key), ": other bytes under the key of an earlier ",
                                         is_gradient ? "gradient" : "statistics"));
    case PutOutcome::kTaken:
      break;
  }
  phase.elements += event.elements;
  const bool counts = event.status != ContributionStatus::kRefused;
  effects.push_back(CountAccepted{.step = key.step, .mode = event.mode, .accepted = counts ? 1u : 0u});
  if (event.status == ContributionStatus::kPresent) effects.push_back(KeepPayload{of.id, event.kind, key.rank});
  if (is_gradient) {
    ++of.in_flight;
    // If one rank has no gradient, all ranks skip the step and the payloads of the others are not needed.
    if (phase.contributions.abstained() > 0) effects.push_back(DropPayloads{of.id, event.kind});
  }
  SealIfDue(of, event.kind, event.now, effects);
  work = work || is_gradient || phase.state == PhaseState::kSealed;
  return false;
}

void LayerMachine::MarkAnswered(ContributionKind kind, const ContributionKey& key) {
  for (auto& [step, of] : window_.steps()) {
    // A rank that sends anything of a later step has this step's answer. It does no harm if an acknowledgement was
    // lost.
    if (step < key.step) of.gradient.contributions.MarkAnswered(key.rank);
    if (kind == ContributionKind::kStatistics && step <= key.step) of.statistics.contributions.MarkAnswered(key.rank);
  }
}

WindowStep& LayerMachine::FindOrOpen(uint64_t step, Mode mode, absl::Time now, Effects& effects) {
  if (WindowStep* const found = window_.Find(step); found != nullptr) return *found;
  WindowStep& of = window_.Open(step, mode, effects);
  CountRanksThatBeganLater(of, now, effects);
  return of;
}

void LayerMachine::SealIfDue(WindowStep& of, ContributionKind kind, absl::Time now, Effects& effects) {
  const bool is_gradient = kind != ContributionKind::kStatistics;
  Phase& phase = of.phase(kind);
  phase.opened_at = std::min(phase.opened_at, now);
  if (phase.contributions.arrived() < phase.contributions.count()) return;
  phase.skip = phase.contributions.present() == 0 || (!is_gradient && of.incomplete);
  phase.Advance(PhaseEvent::kSeal);
  if (!is_gradient) ++of.in_flight;
  effects.push_back(ReportSealed{.step = of.step, .kind = kind, .open_for = now - phase.opened_at});
}

void LayerMachine::On(const AnswerRequested& event, Effects& effects) {
  const ContributionKey& key = event.key;
  if (key.epoch != epoch_) {
    effects.push_back(SenderReply{
        ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleEpoch,
                       absl::StrCat(DescribeKey(*rules().spec, key), ": epoch ", key.epoch, " has ended"))});
    return;
  }
  // Another rank's RESUME may have told of a loss since the contribution arrived.
  if (absl::Status lost = CheckNotLost(key); !lost.ok()) {
    effects.push_back(SenderReply{std::move(lost)});
    return;
  }
  const WindowStep* const of = window_.Find(key.step);
  if (of != nullptr && (of->incomplete || IsPassed(*of))) {
    effects.push_back(SenderReply{of->incomplete ? AnswerIsLost(*of) : Passed(*of)});
  } else if (of == nullptr || of->gradient.state == PhaseState::kRetired) {
    effects.push_back(SenderReply{ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                                                 absl::StrCat(DescribeKey(*rules().spec, key), ": retired"))});
  } else if (of->gradient.state == PhaseState::kApplied) {
    effects.push_back(GiveAnswer{.id = of->id, .step = of->step});
  } else {
    effects.push_back(AwaitAnswer{of->id});
  }
}

// --- epochs ---------------------------------------------------------------------------------------------------------

void LayerMachine::On(const EpochEnded& event, Effects& effects) {
  if (event.epoch <= epoch_) return;
  epoch_ = event.epoch;
  for (const auto& [step, of] : window_.steps()) effects.push_back(EndRequests{.id = of.id, .status = event.why});
}

void LayerMachine::On(const EpochBegan& event, Effects& effects) {
  if (event.epoch != epoch_) return;
  if (event.rollback_epoch > rollback_epoch_) {
    window_.DropAll(rules().Retired(), effects);
    window_.RestartAt(event.rollback_step);
    rollback_epoch_ = event.rollback_epoch;
    goes_on_at_.reset();
    ranks_.Rollback();
    // If the layer hears of the rollback late, the job has gone on, and ranks have begun after its step.
    for (const Member& member : event.replaced) {
      if (member.first_step > event.rollback_step) ranks_.Replace(member, rules().workers_precondition());
    }
  } else {
    for (auto& [step, of] : window_.steps()) of.Inherit(event.replaced);
    for (const Member& member : event.replaced) ranks_.Replace(member, rules().workers_precondition());
  }
  // Work that waited for a replaced rank may be possible now.
  const auto& steps = window_.steps();
  const bool due = std::any_of(steps.begin(), steps.end(), [](const auto& of) {
    return !of.second.restored && of.second.statistics.state == PhaseState::kSealed;
  });
  if (due || !window_.owed_updates().empty()) Wake(effects);
}

void LayerMachine::On(const Closed& event, Effects& effects) {
  // No epoch is later than this one, so every contribution that still arrives is stale.
  epoch_ = std::numeric_limits<uint64_t>::max();
  window_.DropAll(event.why, effects);
  for (const WindowStep& of : std::exchange(window_.owed_updates(), {})) effects.push_back(DropStep{of.id});
}

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
  if (rules().workers_precondition()) return false;
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
  const bool empty = !*std::exchange(of.pending_update, std::nullopt);
  effects.push_back(BeginStep{.step = of.step, .rollback_epoch = rollback_epoch_});
  effects.push_back(AppendUpdate{.id = of.id, .step = of.step, .logged = true});
  effects.push_back(ApplyUpdate{.id = of.id, .step = of.step, .logged = true, .empty = empty});
}

LayerMachine::Offer LayerMachine::OfferUpdate(WindowStep& of, Effects& effects) {
  Phase& phase = of.statistics;
  if (!rules().ExpectsStatistics(of.step, of.mode)) return Offer::kNothing;
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
  const bool empty = ranks.empty();
  effects.push_back(AppendUpdate{.id = of.id, .step = of.step, .ranks = std::move(ranks)});
  effects.push_back(ApplyUpdate{.id = of.id, .step = of.step, .empty = empty});
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
  factors_.version = event.factor_version;
  if (event.restored) --factors_.restored_updates;
  WindowStep* const of = window_.FindId(event.id);
  if (of == nullptr || of->statistics.state == PhaseState::kRetired) {  // the step was dropped meanwhile
    effects.push_back(DropStep{event.id});
    return;
  }
  of->statistics.Advance(PhaseEvent::kApply);
  --of->in_flight;
  // A step that has left the window was kept for this update alone.
  if (of->step >= window_.floor()) return;
  effects.push_back(DropStep{of->id});
  window_.steps().erase(of->step);
}

void LayerMachine::On(const AnswerDone& event, Effects& effects) {
  factors_.version = event.factor_version;
  WindowStep* const of = window_.FindId(event.id);
  if (of == nullptr || of->gradient.state != PhaseState::kSealed) return;  // dropped meanwhile
  const SessionSpec& spec = *rules().spec;
  if (!event.plan_holds) of->plan.reset();
  if (!of->plan.has_value()) {
    effects.push_back(AppendPlan{.step = of->step, .mode = of->mode, .plan = event.plan});
  } else if (of->plan->decision != event.plan.decision || (of->plan->decision == Decision::kPreconditioned &&
                                                           of->plan->factor_version != event.plan.factor_version)) {
    absl::Status why = absl::InternalError(
        absl::StrCat("session \"", spec.name, "\" step ", of->step, " layer \"", spec.layers[rules().layer].name,
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

void LayerMachine::On(const FactorsReplaced& event, Effects&) { factors_.version = event.factor_version; }

void LayerMachine::On(const ReplayFinished& event, Effects& effects) {
  rollback_epoch_ = event.rollback_epoch;
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

// --- inspection -----------------------------------------------------------------------------------------------------

std::set<uint32_t> LayerMachine::MissingRanks(uint64_t step) const {
  std::set<uint32_t> ranks;
  const auto found = window_.steps().find(step);
  if (found == window_.steps().end()) return ranks;
  const WindowStep& of = found->second;
  const auto add = [&ranks](const Phase& phase) {
    if (phase.state != PhaseState::kOpen) return;
    for (uint32_t rank : phase.contributions.missing()) ranks.insert(rank);
  };
  const bool has_gradients = !of.gradient.contributions.empty();
  // Gradients wait for statistics, also for the first of these.
  if (!of.statistics.contributions.empty() || (has_gradients && rules().ExpectsStatistics(step, of.mode))) {
    add(of.statistics);
  }
  if (has_gradients) add(of.gradient);
  return ranks;
}

void LayerMachine::AddStragglers(absl::Time since, Stragglers& stragglers) const {
  for (const auto& [step, of] : window_.steps()) {
    for (const Phase* phase : {&of.statistics, &of.gradient}) {
      if (phase->state != PhaseState::kOpen || phase->opened_at > since) continue;
      if (!stragglers.ranks.empty() && step > stragglers.step) continue;
      if (step < stragglers.step) stragglers.ranks.clear();
      stragglers.step = step;
      for (uint32_t rank : phase->contributions.missing()) stragglers.ranks.insert(rank);
    }
  }
}

}  // namespace precondor

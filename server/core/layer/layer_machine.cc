// SPDX-License-Identifier: Apache-2.0
// Contributions, requests and epochs. layer_machine_ranks.cc handles ranks that are replaced or resume,
// layer_machine_work.cc the worker's side.
#include "server/core/layer/layer_machine.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/layer/payload.h"

namespace precondor {

LayerMachine::LayerMachine(const LayerRules& rules, uint64_t epoch, uint64_t rollback_epoch,
                           absl::Span<const Member> members)
    : rules_(rules), window_(rules), ranks_(rules.spec->world_size), epoch_(epoch), rollback_epoch_(rollback_epoch) {
  for (const Member& member : members) ranks_.Replace(member, rules_.workers_precondition());
}

Effects LayerMachine::Step(const LayerEvent& event) {
  Effects effects;
  std::visit([&](const auto& of) { On(of, effects); }, event);
  return effects;
}

void LayerMachine::Wake(Effects& effects) {
  if (!std::exchange(awake_, true)) effects.push_back(WakeWorker{});
}

// --- checks ---------------------------------------------------------------------------------------------------------

absl::Status LayerMachine::CheckEpoch(const ContributionKey& key) const {
  if (key.epoch == epoch_) return absl::OkStatus();
  // The session's membership was replaced between its check of the contribution and this one.
  const bool ahead = key.epoch > epoch_;
  return ReasonedStatus(ahead ? absl::StatusCode::kUnavailable : absl::StatusCode::kFailedPrecondition,
                        ahead ? ErrorReason::kFutureEpoch : ErrorReason::kStaleEpoch,
                        absl::StrCat(DescribeKey(*rules_.spec, key), ": expected epoch ", epoch_, ", got ", key.epoch));
}

absl::Status LayerMachine::CheckNotLost(const ContributionKey& key) const {
  if (!ranks_.AnyLost()) return absl::OkStatus();
  if (!ranks_.IsLost(key.rank)) {
    return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                          absl::StrCat(DescribeKey(*rules_.spec, key), ": rank ", ranks_.first_lost(),
                                       " has to begin again: the shard has lost factors that it knows"));
  }
  return ReasonedStatus(absl::StatusCode::kDataLoss, ErrorReason::kStateLost,
                        absl::StrCat(DescribeKey(*rules_.spec, key),
                                     ": the shard has lost factors that ranks have had answers with, and cannot give "
                                     "the others the same: go back to a checkpoint with all ranks, and join again"));
}

absl::Status LayerMachine::CheckStep(const ContributionKey& key, Mode mode) const {
  PRECONDOR_RETURN_IF_ERROR(CheckEpoch(key));
  PRECONDOR_RETURN_IF_ERROR(CheckNotLost(key));
  return window_.Check(key, mode, ranks_.HasYetToBegin(key.rank) && rules_.SendsGradient(key.rank));
}

absl::Status LayerMachine::AnswerIsLost(const WindowStep& of) const {
  return ReasonedStatus(
      absl::StatusCode::kDataLoss, ErrorReason::kStateLost,
      absl::StrCat("session \"", rules_.spec->name, "\" layer \"", rules_.spec->layers[rules_.layer].name, "\" step ",
                   of.step, ": a rank has gone on with factors that the shard has lost, and the others cannot get: go ",
                   "back to a checkpoint with all ranks, and join again"));
}

absl::Status LayerMachine::CheckParts(const ContributionArrived& event, const Phase& phase) const {
  const LayerSpec& layer = rules_.spec->layers[rules_.layer];
  const int64_t whole = layer.d_out * layer.d_in;
  if (phase.elements + event.elements <= whole) return absl::OkStatus();
  // Ranks that begin again may divide the gradient in another way: they skip the step that others had begun.
  if (phase.contributions.any_inherited()) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
      absl::StrCat(DescribeKey(*rules_.spec, event.key), ": parts: expected at most ", whole - phase.elements,
                   " elements that other ranks have not sent, got ", event.elements));
}

bool LayerMachine::IsStale(ContributionKind kind, const ContributionKey& key) const {
  return kind == ContributionKind::kStatistics && key.step < window_.FirstToOpen() &&
         window_.Find(key.step) == nullptr && CheckEpoch(key).ok() && CheckNotLost(key).ok();
}

absl::Status LayerMachine::Check(const ContributionHeader& header) const {
  if (IsStale(header.kind, header.key) || AsksForLostAnswer(header.kind, header.key)) return absl::OkStatus();
  absl::Status status = CheckStep(header.key, header.mode);
  // This rank may be the last one that is owed an answer. Taking in the contribution then marks the answer as received.
  return GetErrorReason(status) == ErrorReason::kNotActive ? absl::OkStatus() : status;
}

// --- contributions --------------------------------------------------------------------------------------------------

void LayerMachine::On(const ContributionArrived& event, Effects& effects) {
  effects.push_back(Acknowledge{});
  bool work = false;
  // This is done even if the contribution is then refused. Otherwise two ranks could wait for each other after steps
  // without a frame.
  if (event.key.epoch == epoch_) {
    ranks_.MarkHeard(event.key.rank);
    MarkAnswered(event.kind, event.key);
    work = NoteBegun(event.key, event.now, effects);
    work = NoteCatchup(event.key, event.now, effects) || work;
  }
  absl::StatusOr<bool> duplicate = Admit(event, work, effects);
  if (duplicate.ok()) {
    effects.front() = Acknowledge{.duplicate = *duplicate};
  } else {
    effects.front() = Refuse{std::move(duplicate).status()};
  }
  if (work) Wake(effects);
}

absl::StatusOr<bool> LayerMachine::Admit(const ContributionArrived& event, bool& work, Effects& effects) {
  const ContributionKey& key = event.key;
  const bool is_gradient = event.kind != ContributionKind::kStatistics;
  if (IsStale(event.kind, key)) return true;
  if (CheckEpoch(key).ok() && AsksForLostAnswer(event.kind, key)) LoseRanks(key, effects);
  PRECONDOR_RETURN_IF_ERROR(CheckStep(key, event.mode));
  // The method needs no statistics: acknowledge them without effect.
  if (!is_gradient && !rules_.needs_statistics) return false;
  WindowStep& of = FindOrOpen(key.step, event.mode, event.now, effects);
  Phase& phase = of.phase(event.kind);
  // The contributors of a restored step have been counted, but what each rank sent is not known. Treat it as a
  // repetition.
  if (!is_gradient && of.restored && phase.state != PhaseState::kOpen) return true;
  if (is_gradient && of.incomplete) return AnswerIsLost(of);
  if (is_gradient && IsPassed(of)) return Passed(of);
  if (phase.state != PhaseState::kOpen && !phase.contributions.has(key.rank)) {
    return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                          absl::StrCat(DescribeKey(*rules_.spec, key), ": retired without this rank"));
  }
  if (event.elements > 0 && !phase.contributions.has(key.rank)) PRECONDOR_RETURN_IF_ERROR(CheckParts(event, phase));
  switch (phase.contributions.Put(key.rank, event.status, event.digest)) {
    case PutOutcome::kDuplicate:
      return true;
    case PutOutcome::kConflict:
      return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kConflict,
                            absl::StrCat(DescribeKey(*rules_.spec, key), ": other bytes under the key of an earlier ",
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
    effects.push_back(
        Refuse{ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleEpoch,
                              absl::StrCat(DescribeKey(*rules_.spec, key), ": epoch ", key.epoch, " has ended"))});
    return;
  }
  const WindowStep* const of = window_.Find(key.step);
  if (of != nullptr && (of->incomplete || IsPassed(*of))) {
    effects.push_back(Refuse{of->incomplete ? AnswerIsLost(*of) : Passed(*of)});
  } else if (of == nullptr || of->gradient.state == PhaseState::kRetired) {
    effects.push_back(Refuse{ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                                            absl::StrCat(DescribeKey(*rules_.spec, key), ": retired"))});
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
    window_.DropAll(rules_.Retired(), effects);
    window_.RestartAt(event.rollback_step);
    rollback_epoch_ = event.rollback_epoch;
    goes_on_at_.reset();
    ranks_.Rollback();
    // If the layer hears of the rollback late, the job has gone on, and ranks have begun after its step.
    for (const Member& member : event.replaced) {
      if (member.first_step > event.rollback_step) ranks_.Replace(member, rules_.workers_precondition());
    }
  } else {
    for (auto& [step, of] : window_.steps()) of.Inherit(event.replaced);
    for (const Member& member : event.replaced) ranks_.Replace(member, rules_.workers_precondition());
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

std::set<uint32_t> LayerMachine::MissingRanks(uint64_t step) const {
  std::set<uint32_t> ranks;
  const auto found = window_.steps().find(step);
  if (found == window_.steps().end()) return ranks;
  for (const Phase* phase : {&found->second.statistics, &found->second.gradient}) {
    if (phase->state != PhaseState::kOpen || phase->contributions.empty()) continue;
    for (uint32_t rank : phase->contributions.missing()) ranks.insert(rank);
  }
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

// SPDX-License-Identifier: Apache-2.0
// Ranks that are replaced or resume: where a process begins, which answers it has from an earlier shard generation, and
// which steps cannot be completed for that reason.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/core/layer/layer_machine.h"

namespace precondor {

absl::Status LayerMachine::Passed(const WindowStep& of) const {
  return ReasonedStatus(
      absl::StatusCode::kAborted, ErrorReason::kStaleStep,
      absl::StrCat("session \"", rules().spec->name, "\" layer \"", rules().spec->layers[rules().layer].name,
                   "\" step ", of.step,
                   ": a rank had its answer before the shard came back, and does not send its gradient again: ",
                   "a rank without the answer goes back to a checkpoint with all ranks"));
}

bool LayerMachine::IsPassed(const WindowStep& of) const {
  if (rules().workers_precondition() || rules().one_answer()) return false;
  if (!of.restored || of.gradient.state != PhaseState::kOpen) return false;
  const std::vector<uint32_t> missing = of.gradient.contributions.missing();
  return std::any_of(missing.begin(), missing.end(), [&](uint32_t rank) { return ranks_.ResumedAfter(rank, of.step); });
}

uint64_t LayerMachine::first_kept() const {
  // After a loss the job goes back as a whole: also the ranks that have nothing to ask here, and away from what the
  // journal still has of the steps.
  if (ranks_.first_lost().has_value()) return std::numeric_limits<uint64_t>::max();
  uint64_t first = window_.FirstKept();
  for (const auto& [step, of] : window_.steps()) {
    if (IsPassed(of)) first = std::max(first, step + 1);
  }
  return first;
}

bool LayerMachine::NoteBegun(const ContributionKey& key, absl::Time now, Effects& effects) {
  if (!ranks_.Begin(key.rank) || rules().workers_precondition()) return false;
  bool work = window_.SkipStepsBefore(key.rank, key.step, /*resumes=*/false, effects);
  // Statistics that the rank's earlier process did not deliver, or that a shard has lost, are not sent again.
  for (auto& [step, of] : window_.steps()) {
    if (step < key.step) work = AbstainFromStatistics(of, key.rank, now, effects) || work;
  }
  return work;
}

bool LayerMachine::NoteCatchup(const ContributionKey& key, absl::Time now, Effects& effects) {
  std::optional<RankProgress::Catchup>& catchup = ranks_.catchup(key.rank);
  if (!catchup.has_value()) return false;
  bool work = std::exchange(catchup->step, std::max(catchup->step, key.step)) < key.step;
  if (std::exchange(catchup->begun, true)) return work;
  for (auto& [step, of] : window_.steps()) work = CountRanksThatBeganLater(of, now, effects) || work;
  return work;
}

bool LayerMachine::AbstainFromStatistics(WindowStep& of, uint32_t rank, absl::Time now, Effects& effects) {
  Phase& phase = of.statistics;
  if (!rules().ExpectsStatistics(of.step, of.mode) || phase.state != PhaseState::kOpen) return false;
  if (phase.contributions.has(rank)) return false;
  phase.contributions.Put(rank, ContributionStatus::kAbstained, /*digest=*/0);
  if (rules().workers_precondition() && !std::exchange(of.incomplete, true)) {
    of.in_flight -= of.gradient.contributions.arrived();
    effects.push_back(EndRequests{.id = of.id, .status = AnswerIsLost(of)});
  }
  SealIfDue(of, ContributionKind::kStatistics, now, effects);
  return true;
}

bool LayerMachine::CountRanksThatBeganLater(WindowStep& of, absl::Time now, Effects& effects) {
  bool counted = false;
  if (!rules().workers_precondition()) {
    ranks_.ForEachThatBeganAfter(
        of.step, [&](uint32_t rank) { counted = AbstainFromStatistics(of, rank, now, effects) || counted; });
    return counted;
  }
  ranks_.ForEachCatchup([&](uint32_t rank, const RankProgress::Catchup& catchup) {
    if (!catchup.begun || of.step >= catchup.first_step) return;
    Phase& pulls = of.gradient;
    if (AbstainFromStatistics(of, rank, now, effects)) counted = true;
    if (of.incomplete) return;
    if (pulls.state == PhaseState::kOpen && !pulls.contributions.has(rank)) {
      pulls.contributions.Put(rank, ContributionStatus::kPresent, /*digest=*/0);
      ++of.in_flight;
      SealIfDue(of, ContributionKind::kPull, now, effects);
      counted = true;
    }
  });
  return counted;
}

void LayerMachine::NoteLoss(const RankResumed& event, uint64_t lost, Effects& effects) {
  if (ranks_.first_lost().has_value()) return;
  if (!event.begins) ranks_.Lack(event.key.rank, event.next_step);
  const bool first = lost > 0 && !goes_on_at_.has_value();
  if (first) goes_on_at_ = event.next_step;
  if (!goes_on_at_.has_value()) return;
  // Workers that hold factors cannot go on with others.
  bool torn = rules().workers_precondition() || ranks_.AnyLacksFromOther(*goes_on_at_) ||
              (event.begins && event.key.step != *goes_on_at_);
  for (const auto& [step, of] : window_.steps()) {
    if (!first || step >= *goes_on_at_ || of.gradient.state == PhaseState::kApplied) continue;
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(rules().spec->world_size); ++rank) {
      torn = torn || (of.gradient.contributions.has(rank) &&
                      AsksForLostAnswer(ContributionKind::kGradient, {.step = step, .rank = rank}));
    }
  }
  if (torn) return LoseRanks(event.key, effects);
  if (first) window_.DropBefore(*goes_on_at_, rules().Retired(), effects);
}

bool LayerMachine::AsksForLostAnswer(ContributionKind kind, const ContributionKey& key) const {
  return goes_on_at_.has_value() && kind == ContributionKind::kGradient && key.step < *goes_on_at_ &&
         !ranks_.HasTold(key.rank);
}

void LayerMachine::LoseRanks(const ContributionKey& key, Effects& effects) {
  goes_on_at_.reset();
  ranks_.LoseAll();
  window_.DropAll(CheckNotLost(key), effects);
  window_.RestartAt(0);
}

void LayerMachine::On(const RankResumed& event, Effects& effects) {
  const ContributionKey& key = event.key;
  if (absl::Status status = CheckEpoch(key); !status.ok()) {
    effects.push_back(SenderReply{std::move(status)});
    return;
  }
  const uint64_t known = factors_.version + factors_.restored_updates;
  const uint64_t lost = event.factor_version > known ? event.factor_version - known : 0;
  // A RESUME is repeated until its acknowledgement has come. The rank is then told the same again.
  const uint64_t told = event.begins ? lost : ranks_.NoteUpdatesLost(key.rank, lost);
  const auto report = [&] {
    if (told == 0) return;
    effects.push_back(ReportUpdatesLost{.rank = key.rank,
                                        .lost = told,
                                        .newly = ranks_.NoteReported(told),
                                        .answered_with = event.factor_version,
                                        .known = known});
  };
  // The RESUME is from a stream that broke long ago, or the other ranks went on before this rank came back.
  if (!ranks_.MarkHeard(key.rank) && key.step < window_.floor()) {
    report();
    return;
  }
  if (!rules().one_answer()) NoteLoss(event, lost, effects);
  const absl::Status status = CheckNotLost(key);
  if (!status.ok()) effects.insert(effects.begin(), SenderReply{status});
  if (event.begins) {
    if (status.ok() && NoteBegun(key, event.now, effects)) Wake(effects);
    report();
    return;
  }
  ranks_.Begin(key.rank);
  bool work = NoteCatchup(key, event.now, effects);
  if (status.ok()) {
    ranks_.Resume(key.rank, key.step);
    for (const auto& [step, of] : window_.steps()) {
      if (of.gradient.contributions.empty() || !IsPassed(of)) continue;
      effects.push_back(EndRequests{.id = of.id, .status = Passed(of)});
    }
  }
  if (status.ok()) work = window_.SkipStepsBefore(key.rank, key.step, /*resumes=*/true, effects) || work;
  if (work) Wake(effects);
  report();
}

void LayerMachine::On(const FactorsRequested& event, Effects& effects) {
  absl::Status status = CheckEpoch(event.key);
  if (status.ok()) {
    // The step of a FETCH is where the rank begins. It does not show that the rank has reached that step.
    ContributionKey fetch = event.key;
    fetch.step = 0;
    if (NoteCatchup(fetch, event.now, effects)) Wake(effects);
    status = CheckNotLost(event.key);
  }
  if (status.ok()) {
    effects.push_back(FetchFactors{});
  } else {
    effects.push_back(SenderReply{std::move(status)});
  }
}

}  // namespace precondor

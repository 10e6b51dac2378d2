// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/step_window.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/layer/admission.h"
#include "server/core/resources/reservation.h"

namespace precondor {

Contributions LayerRules::statistics_contributors() const { return Contributions(0, spec->world_size); }

Contributions LayerRules::gradient_contributors() const {
  if (spec->exchange == ExchangeMode::kDelegate) return Contributions(DelegateRank(*spec, layer), 1);
  return Contributions(0, spec->world_size);
}

bool LayerRules::SendsGradient(uint32_t rank) const {
  return spec->exchange != ExchangeMode::kDelegate || rank == static_cast<uint32_t>(DelegateRank(*spec, layer));
}

bool LayerRules::one_answer() const { return GradientContributors(*spec) == 1; }

// In first order only DIRECT sends something; workers that hold factors send at statistic steps alone.
bool LayerRules::has_gaps() const { return spec->exchange != ExchangeMode::kDirect; }

bool LayerRules::ExpectsStatistics(uint64_t step, Mode mode) const {
  return mode == Mode::kSecondOrder && needs_statistics && IsStatisticStep(*spec, step);
}

absl::Status LayerRules::Retired() const {
  return ReasonedStatus(
      absl::StatusCode::kAborted, ErrorReason::kStaleStep,
      absl::StrCat("session \"", spec->name, "\" layer \"", spec->layers[layer].name, "\": the step is retired"));
}

PhaseState NextState(PhaseState state, PhaseEvent event) {
  switch (event) {
    case PhaseEvent::kSeal:
      PRECONDOR_CHECK(state == PhaseState::kOpen);
      return PhaseState::kSealed;
    case PhaseEvent::kApply:
      PRECONDOR_CHECK(state == PhaseState::kSealed);
      return PhaseState::kApplied;
    case PhaseEvent::kRetire:
      // Allowed from any state, because an epoch may end at any time.
      return PhaseState::kRetired;
  }
  PRECONDOR_CHECK(false);
  return state;
}

void WindowStep::Inherit(absl::Span<const Member> members) {
  for (const Member& member : members) {
    const bool repeats = member.first_step <= step;
    statistics.contributions.Inherit(member.rank, repeats);
    gradient.contributions.Inherit(member.rank, repeats);
  }
}

std::optional<uint32_t> WindowStep::owed_rank() const {
  const std::optional<uint32_t> rank = statistics.contributions.owed_rank();
  return rank.has_value() ? rank : gradient.contributions.owed_rank();
}

// --- lookups --------------------------------------------------------------------------------------------------------

WindowStep* StepWindow::Find(uint64_t step) {
  const auto found = steps_.find(step);
  return found == steps_.end() ? nullptr : &found->second;
}

const WindowStep* StepWindow::Find(uint64_t step) const {
  const auto found = steps_.find(step);
  return found == steps_.end() ? nullptr : &found->second;
}

WindowStep* StepWindow::FindId(StepId id) {
  for (auto& [step, of] : steps_) {
    if (of.id == id) return &of;
  }
  return nullptr;
}

uint64_t StepWindow::FirstToOpen() const {
  uint64_t first = opens_from_;
  for (const auto& [step, of] : steps_) {
    if (of.restored) first = std::max(first, step);
  }
  return first;
}

uint64_t StepWindow::FirstKept() const {
  uint64_t first = std::max(floor_, opens_from_);
  for (const auto& [step, of] : steps_) {
    const bool overtaken = of.restored && of.gradient.state == PhaseState::kOpen && IsOvertaken(of);
    if (overtaken || of.incomplete || of.gradient.state == PhaseState::kRetired) first = std::max(first, step + 1);
    // An applied update cannot be undone, so the factors from before a sealed step are soon lost.
    const bool sealed = of.statistics.state == PhaseState::kSealed || of.statistics.state == PhaseState::kApplied;
    if (rules_.workers_precondition() && sealed) first = std::max(first, step);
  }
  return first;
}

bool StepWindow::HasAnswered(uint64_t step) const {
  const WindowStep* const found = Find(step);
  return found != nullptr && (found->restored || found->gradient.state != PhaseState::kOpen);
}

bool StepWindow::IsOvertaken(const WindowStep& of) const {
  return std::any_of(steps_.upper_bound(of.step), steps_.end(),
                     [](const auto& later) { return later.second.gradient.state != PhaseState::kOpen; });
}

int64_t StepWindow::in_flight() const {
  int64_t sum = 0;
  for (const auto& [step, of] : steps_) sum += of.in_flight;
  return sum;
}

// --- checks ---------------------------------------------------------------------------------------------------------

absl::Status StepWindow::Check(const ContributionKey& key, Mode mode, bool begins) const {
  if (key.step < floor_) {
    return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                          absl::StrCat(DescribeKey(*rules_.spec, key), ": steps below ", floor_, " are retired"));
  }
  const WindowStep* const found = Find(key.step);
  if (found == nullptr) return CheckWindow(key, begins);
  if (found->mode == mode) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kModeConflict,
                        absl::StrCat(DescribeKey(*rules_.spec, key), ": expected mode ", ModeName(found->mode),
                                     " as the step began, got ", ModeName(mode)));
}

absl::Status StepWindow::CheckWindow(const ContributionKey& key, bool begins) const {
  const SessionSpec& spec = *rules_.spec;
  if (const uint64_t first = FirstToOpen(); key.step < first) {
    return ReasonedStatus(
        absl::StatusCode::kAborted, ErrorReason::kStaleStep,
        absl::StrCat(DescribeKey(spec, key), ": a rank has passed it, and sends nothing to steps below ", first));
  }
  if (steps_.empty()) return absl::OkStatus();
  const uint64_t window = rules_.window_steps;
  const uint64_t newest = std::max(steps_.rbegin()->first, opens_from_);
  bool blocked = !rules_.has_gaps() && !begins && key.step > newest && key.step - newest > window;
  size_t kept = 1;
  for (const auto& [step, of] : steps_) {
    if (begins && step < key.step && CannotComplete(of, key.rank, key.step, /*resumes=*/false)) continue;
    const bool leaves = key.step > step && key.step - step >= window;
    if (const std::optional<uint32_t> rank = of.owed_rank(); leaves && rank.has_value()) {
      return ReasonedStatus(
          absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
          absl::StrCat(DescribeKey(spec, key), ": rank ", *rank, " begins again and has not come past step ", step));
    }
    if (leaves && of.restored && of.gradient.state == PhaseState::kSealed) {
      // A rank that got the answer before the shard came back may be ahead of the ranks that get it now.
      return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                            absl::StrCat(DescribeKey(spec, key), ": step ", step, " is being answered again"));
    }
    blocked = blocked || (leaves && !MayLeaveWindow(of));
    const bool finished = MayLeaveWindow(of) && of.statistics.state != PhaseState::kSealed;
    if (!leaves || !finished) ++kept;
  }
  if (!blocked && kept <= window + 1) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead,
                        absl::StrCat(DescribeKey(spec, key), ": step ", steps_.begin()->first,
                                     " is not finished or lies too far back; the window is ", window,
                                     " steps, and a step without a gradient needs an abstention"));
}

bool StepWindow::MayLeaveWindow(const WindowStep& of) const {
  // A sealed gradient phase still owes answers. Sealed statistics only wait for their turn.
  const bool statistics = of.statistics.state != PhaseState::kOpen || of.statistics.contributions.empty();
  // A restored step needs no more answers once a rank asks for a step so much later.
  const bool answered = of.gradient.state == PhaseState::kApplied || of.gradient.state == PhaseState::kRetired;
  return statistics &&
         (answered || of.gradient.untouched() || (of.restored && of.gradient.state != PhaseState::kSealed));
}

bool StepWindow::CannotComplete(const WindowStep& of, uint32_t rank, uint64_t step, bool resumes) const {
  if (of.gradient.state != PhaseState::kOpen || of.gradient.contributions.has(rank)) return false;
  // The step was answered before the shard came back, unless the journal has lost the records after it.
  return !(of.restored && (resumes || rules_.one_answer()) && HasAnswered(step - 1));
}

// --- changes --------------------------------------------------------------------------------------------------------

WindowStep& StepWindow::Open(uint64_t step, Mode mode, Effects& effects) {
  if (step + 1 > rules_.window_steps) floor_ = std::max(floor_, step + 1 - rules_.window_steps);
  for (auto it = steps_.begin(); it != steps_.end() && it->first < floor_;) {
    WindowStep& old = it->second;
    // No rank sends this gradient again or may ask for its answer.
    RetireGradient(old, effects);
    if (old.statistics.state == PhaseState::kSealed) {
      ++it;
      continue;
    }
    effects.push_back(DropStep{old.id});
    it = steps_.erase(it);
  }
  return steps_
      .emplace(step, WindowStep{.id = ++last_id_,
                                .step = step,
                                .mode = mode,
                                .statistics = Phase(rules_.statistics_contributors()),
                                .gradient = Phase(rules_.gradient_contributors())})
      .first->second;
}

bool StepWindow::SkipStepsBefore(uint32_t rank, uint64_t step, bool resumes, Effects& effects) {
  if (!rules_.SendsGradient(rank)) return false;
  bool ended = false;
  if (step > 0 && !HasAnswered(step - 1)) opens_from_ = std::max(opens_from_, step);
  for (auto it = steps_.begin(); it != steps_.end() && it->first < step;) {
    WindowStep& of = it->second;
    if (!CannotComplete(of, rank, step, resumes)) {
      ++it;
      continue;
    }
    ended = true;
    opens_from_ = std::max(opens_from_, it->first + 1);
    RetireGradient(of, effects);
    // Not all ranks send the statistics of this step again.
    if (of.statistics.state == PhaseState::kOpen) of.statistics.Advance(PhaseEvent::kRetire);
    if (of.statistics.state == PhaseState::kSealed) {
      ++it;
      continue;
    }
    effects.push_back(DropStep{of.id});
    it = steps_.erase(it);
  }
  return ended;
}

void StepWindow::RetireGradient(WindowStep& of, Effects& effects) {
  if (of.gradient.state == PhaseState::kOpen && !of.incomplete) of.in_flight -= of.gradient.contributions.arrived();
  of.gradient.Advance(PhaseEvent::kRetire);
  effects.push_back(EndRequests{.id = of.id, .status = rules_.Retired(), .retired = true});
}

void StepWindow::DropAll(const absl::Status& why, Effects& effects) { DropSteps(steps_.end(), why, effects); }

void StepWindow::DropBefore(uint64_t step, const absl::Status& why, Effects& effects) {
  DropSteps(steps_.lower_bound(step), why, effects);
  floor_ = std::max(floor_, step);
  // A rank may have passed later steps.
  opens_from_ = std::max(opens_from_, step);
}

void StepWindow::DropSteps(std::map<uint64_t, WindowStep>::iterator end, const absl::Status& why, Effects& effects) {
  for (auto it = steps_.begin(); it != end; ++it) {
    WindowStep& of = it->second;
    effects.push_back(EndRequests{.id = of.id, .status = why, .retired = true});
    const bool owed = of.pending_update.has_value() && of.statistics.state == PhaseState::kSealed;
    of.in_flight = 0;
    if (owed) {
      owed_updates_.push_back(std::move(of));
    } else {
      effects.push_back(DropStep{of.id});
    }
  }
  steps_.erase(steps_.begin(), end);
}

}  // namespace precondor

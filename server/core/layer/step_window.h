// SPDX-License-Identifier: Apache-2.0
// The steps of one layer that ranks may contribute to or ask for again: the only place that opens and retires steps.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "server/core/layer/contributions.h"
#include "server/core/layer/layer_events.h"
#include "server/core/layer/layer_rules.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_journal.h"

namespace precondor {

// OPEN takes contributions; SEALED has them all (or gave up on the rest) and waits for its turn with the worker;
// APPLIED is in the factors or answered, and kept for repetitions; RETIRED takes part in nothing any more.
enum class PhaseState : uint8_t { kOpen, kSealed, kApplied, kRetired };
enum class PhaseEvent : uint8_t { kSeal, kApply, kRetire };

// The only way from one state to the next. An event that the state does not allow is a bug and aborts.
PhaseState NextState(PhaseState state, PhaseEvent event);

// One of the two halves of a step.
struct Phase {
  explicit Phase(Contributions of) : contributions(std::move(of)) {}
  Contributions contributions;
  PhaseState state = PhaseState::kOpen;
  bool skip = false;  // sealed without a usable quorum
  absl::Time opened_at = absl::InfiniteFuture();
  absl::Time sealed_at = absl::InfiniteFuture();

  template <typename H>
  friend H AbslHashValue(H h, const Phase& phase) {
    return H::combine(std::move(h), phase.contributions, phase.state, phase.skip);
  }

  // Nothing is lost when it is dropped.
  bool untouched() const { return state == PhaseState::kOpen && contributions.empty(); }
  void Advance(PhaseEvent event) { state = NextState(state, event); }
};

struct WindowStep {
  StepId id = 0;
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;  // of the first contribution; that of the others has to be equal
  Phase statistics;
  Phase gradient;
  bool restored = false;  // from the journal, after the process that had it was lost
  // Where workers hold factors: statistics of it are lost with a shard generation, and a rank has gone on with the
  // factors that they made. No update is made of the rest, and no rank gets an answer: it would have other factors.
  bool incomplete = false;
  // The journal's record of its update has yet to be applied; the value says whether there is anything to apply.
  std::optional<bool> pending_update = {};
  std::optional<Plan> plan = {};  // that a rank may have been answered with before the shard came back
  int64_t in_flight = 0;          // unanswered gradients, and updates that are due

  Phase& phase(ContributionKind kind) { return kind == ContributionKind::kStatistics ? statistics : gradient; }
  // These processes took ranks over: what the earlier processes sent stands.
  void Inherit(absl::Span<const Member> members);
  // A rank that is to come to this step again.
  std::optional<uint32_t> owed_rank() const;
  // Without ids and times, as are the others: states that differ in these alone go on alike (tests/explore).
  template <typename H>
  friend H AbslHashValue(H h, const WindowStep& of) {
    const bool planned = of.plan.has_value();
    h = H::combine(std::move(h), of.step, of.mode, of.statistics, of.gradient, of.restored, of.incomplete,
                   of.in_flight);
    return H::combine(std::move(h), of.pending_update.has_value(), of.pending_update.value_or(false), planned,
                      planned ? of.plan->decision : Decision::kSkip, planned ? of.plan->factor_version : 0);
  }
};

// A value; not thread-safe. At most window_steps + 1 steps are in it; the oldest may only be waiting for its update.
class StepWindow {
 public:
  explicit StepWindow(const LayerRules& rules) : rules_(rules) {}

  WindowStep* Find(uint64_t step);
  const WindowStep* Find(uint64_t step) const;
  WindowStep* FindId(StepId id);
  std::map<uint64_t, WindowStep>& steps() { return steps_; }
  const std::map<uint64_t, WindowStep>& steps() const { return steps_; }

  // Steps below it are retired.
  uint64_t floor() const { return floor_; }
  // Steps below it are never opened: a rank has moved past them, or had when the process before this one was lost.
  uint64_t FirstToOpen() const;
  // The first step from which on the layer keeps everything that a process which begins there needs.
  uint64_t FirstKept() const;
  // ABORTED STALE_STEP; UNAVAILABLE NOT_ACTIVE; FAILED_PRECONDITION STEP_TOO_FAR_AHEAD or MODE_CONFLICT. `begins`: the
  // rank was replaced and shows with this contribution where it begins.
  absl::Status Check(const ContributionKey& key, Mode mode, bool begins) const;
  // The step's gradients have been answered or will be, here or by the process before this one.
  bool HasAnswered(uint64_t step) const;
  // A later step's gradient is on its way: each rank that contributed to that step has had this one's answer, or had
  // sent this one again before.
  bool IsOvertaken(const WindowStep& of) const;

  // When the step could have been answered but for its statistics: its gradients were complete, or those of a later
  // step, if its own are not sent any more. InfiniteFuture: not yet.
  absl::Time CouldBeAnsweredAt(const WindowStep& of) const;

  // Opens the step, which is not in the window and has passed Check, and retires those that leave the window.
  WindowStep& Open(uint64_t step, Mode mode, Effects& effects);
  // `rank` sends no gradient of steps before `step`: those that lack it end, and none of them is opened any more.
  // `resumes`: it goes on, and has the answers to those that the journal knows of. Does nothing for a rank that sends
  // no gradients of the layer. True when later steps may have waited for one that ended.
  bool SkipStepsBefore(uint32_t rank, uint64_t step, bool resumes, Effects& effects);
  // Ends a gradient phase that is not going to be completed.
  void RetireGradient(WindowStep& of, Effects& effects);
  // The update of a sealed statistics phase has been applied.
  void FinishUpdate(WindowStep& of);
  // Drops all steps; requests get `why`. Pending updates of the journal stay due.
  void DropAll(const absl::Status& why, Effects& effects);
  // Only steps from `step` on are opened. Precondition: no steps.
  void RestartAt(uint64_t step) { floor_ = opens_from_ = step; }

  // Updates of the journal whose steps were dropped before their turn: they are part of the factors all the same.
  std::vector<WindowStep>& owed_updates() { return owed_updates_; }
  // The sum of all steps' in_flight.
  int64_t in_flight() const;
  template <typename H>
  friend H AbslHashValue(H h, const StepWindow& window) {
    return H::combine(std::move(h), window.steps_, window.owed_updates_, window.floor_, window.opens_from_);
  }

 private:
  absl::Status CheckWindow(const ContributionKey& key, bool begins) const;
  bool Closable(const WindowStep& of) const;
  // The step, before `step`, cannot be completed: see SkipStepsBefore.
  bool LacksFor(const WindowStep& of, uint32_t rank, uint64_t step, bool resumes) const;

  LayerRules rules_;
  std::map<uint64_t, WindowStep> steps_;
  std::vector<WindowStep> owed_updates_;
  uint64_t floor_ = 0;
  uint64_t opens_from_ = 0;
  StepId last_id_ = 0;
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The steps of one layer that ranks may contribute to or ask for again. Only StepWindow opens and retires steps.
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
#include "server/core/api/shard_control.h"
#include "server/core/api/shard_journal.h"
#include "server/core/layer/contributions.h"
#include "server/core/layer/layer_events.h"

namespace precondor {

// The constants of one layer of a session that its state machine needs. A value type. `spec` must outlive it.
struct LayerRules {
  const SessionSpec* spec = nullptr;
  uint32_t layer = 0;
  bool needs_statistics = true;  // Method::needs_statistics
  uint64_t window_steps = 2;     // see ShardOptions

  Contributions statistics_contributors() const;
  Contributions gradient_contributors() const;
  bool SendsGradient(uint32_t rank) const;
  // Returns true if one rank sends the gradients and gets the answers.
  bool one_answer() const;
  // Returns true if workers hold the factors too (REPLAY, PULL_FACTORS). A pull then takes the gradient's place.
  bool workers_precondition() const { return WorkersPrecondition(*spec); }
  // Returns true if some steps have no gradient, so that the next step with one can be any number of steps ahead.
  bool has_gaps() const;
  bool ExpectsStatistics(uint64_t step, Mode mode) const;
  // Returns ABORTED (STALE_STEP), for requests that wait for the answer to a step that has been retired.
  absl::Status Retired() const;
};

// State of one phase of a step. OPEN takes contributions. SEALED has all contributions and waits for its turn with the
// worker. APPLIED is in the factors, or answered, and is kept for repetitions.
// RETIRED has no further part in the protocol.
enum class PhaseState : uint8_t { kOpen, kSealed, kApplied, kRetired };
enum class PhaseEvent : uint8_t { kSeal, kApply, kRetire };

// Returns the state that follows. Aborts if `state` does not allow `event`, which is a bug.
PhaseState NextState(PhaseState state, PhaseEvent event);

// One of the two halves of a step: its statistics, or its gradients or pulls.
struct Phase {
  explicit Phase(Contributions of) : contributions(std::move(of)) {}
  Contributions contributions;
  PhaseState state = PhaseState::kOpen;
  bool skip = false;     // sealed, but nothing is to be applied
  int64_t elements = 0;  // SHARDED: of the parts that have come
  absl::Time opened_at = absl::InfiniteFuture();

  template <typename H>
  friend H AbslHashValue(H h, const Phase& phase) {
    return H::combine(std::move(h), phase.contributions, phase.state, phase.skip);
  }

  // Returns true if dropping the phase loses nothing.
  bool untouched() const { return state == PhaseState::kOpen && contributions.empty(); }
  void Advance(PhaseEvent event) { state = NextState(state, event); }
};

struct WindowStep {
  StepId id = 0;
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;  // mode of the first contribution; later contributions must have it too
  Phase statistics;
  Phase gradient;
  bool restored = false;  // restored from the journal after the previous process ended
  // Used only if workers hold factors. Some of the step's statistics were lost with a shard generation, and a rank has
  // gone on with the factors that they made. No update is made of the remaining statistics and no rank gets an answer,
  // because the factors would differ from those of that rank.
  bool incomplete = false;
  // Set while the update of the journal's record has yet to be applied. True if the record has something to apply.
  std::optional<bool> pending_update = {};
  std::optional<Plan> plan = {};  // plan that a rank may have been answered with before the shard came back
  int64_t in_flight = 0;          // unanswered gradients, and updates that are due

  Phase& phase(ContributionKind kind) { return kind == ContributionKind::kStatistics ? statistics : gradient; }
  // Notes that `members` took ranks over. The contributions of the earlier processes stay.
  void Inherit(absl::Span<const Member> members);
  // Returns a rank whose current process still needs an answer of this step, or nullopt.
  std::optional<uint32_t> owed_rank() const;
  // Leaves out ids and times, as the other hashes here do: states that differ only in these behave alike
  // (tests/explore).
  template <typename H>
  friend H AbslHashValue(H h, const WindowStep& of) {
    const bool planned = of.plan.has_value();
    h = H::combine(std::move(h), of.step, of.mode, of.statistics, of.gradient, of.restored, of.incomplete,
                   of.in_flight);
    return H::combine(std::move(h), of.pending_update.has_value(), of.pending_update.value_or(false), planned,
                      planned ? of.plan->decision : Decision::kSkip, planned ? of.plan->factor_version : 0);
  }
};

// Holds the steps of one layer, at most window_steps + 1. Steps below floor() stay in it only until their update is
// applied. A value type; not thread-safe.
class StepWindow {
 public:
  explicit StepWindow(const LayerRules& rules) : rules_(rules) {}
  const LayerRules& rules() const { return rules_; }

  WindowStep* Find(uint64_t step);
  const WindowStep* Find(uint64_t step) const;
  WindowStep* FindId(StepId id);
  std::map<uint64_t, WindowStep>& steps() { return steps_; }
  const std::map<uint64_t, WindowStep>& steps() const { return steps_; }

  // Steps below floor() are retired.
  uint64_t floor() const { return floor_; }
  // Returns the first step that may be opened: a rank has moved past all steps below it, in this process or before the
  // previous one was lost.
  uint64_t FirstToOpen() const;
  // Returns the first step from which on the layer keeps everything that a process needs if it begins there.
  uint64_t FirstKept() const;
  // Returns OK if the window takes a contribution to the step. Otherwise returns
  // - ABORTED (STALE_STEP) if the step is retired or below FirstToOpen();
  // - UNAVAILABLE (NOT_ACTIVE) if a step that would leave the window owes a replaced rank an answer, or is being
  //   answered again after a restart;
  // - FAILED_PRECONDITION (STEP_TOO_FAR_AHEAD) if an earlier step is not finished, or the step is beyond the window;
  // - FAILED_PRECONDITION (MODE_CONFLICT) if the step is open with another mode.
  // `begins` says that the rank was replaced and shows with this contribution where it begins.
  absl::Status Check(const ContributionKey& key, Mode mode, bool begins) const;
  // Returns true if the gradient phase of a later step is not open. Each rank that contributed to that step has this
  // step's answer, or has sent its gradient of this step again before.
  bool IsOvertaken(const WindowStep& of) const;

  // Opens the step and retires the steps that leave the window. Precondition: the step is not in the window and has
  // passed Check.
  WindowStep& Open(uint64_t step, Mode mode, Effects& effects);
  // Ends the steps before `step` that lack the gradient of `rank`, because `rank` does not send it, and opens none of
  // them again. `resumes` says that the rank goes on and has the answers to the steps that the journal knows. Does
  // nothing if the rank sends no gradients of the layer. Returns true if a step has ended, so that later steps may have
  // work.
  bool SkipStepsBefore(uint32_t rank, uint64_t step, bool resumes, Effects& effects);
  // Retires the gradient phase of a step and ends its requests with ABORTED (STALE_STEP).
  void RetireGradient(WindowStep& of, Effects& effects);
  // Drops all steps and ends their requests with `why`. Pending updates of the journal move to owed_updates().
  void DropAll(const absl::Status& why, Effects& effects);
  // Drops the steps before `step`, like DropAll, and allows only steps from `step` on.
  void DropBefore(uint64_t step, const absl::Status& why, Effects& effects);
  // Allows only steps from `step` on. Precondition: the window has no steps.
  void RestartAt(uint64_t step) { floor_ = opens_from_ = step; }

  // Updates of the journal whose steps were dropped before their turn. They are part of the factors all the same.
  std::vector<WindowStep>& owed_updates() { return owed_updates_; }
  // Returns the sum of in_flight over all steps.
  int64_t in_flight() const;
  template <typename H>
  friend H AbslHashValue(H h, const StepWindow& window) {
    return H::combine(std::move(h), window.steps_, window.owed_updates_, window.floor_, window.opens_from_);
  }

 private:
  // Drops the steps before `end`; see DropAll.
  void DropSteps(std::map<uint64_t, WindowStep>::iterator end, const absl::Status& why, Effects& effects);
  // Returns true if the step's gradients have been or will be answered, by this process or the one before it.
  bool HasAnswered(uint64_t step) const;
  absl::Status CheckWindow(const ContributionKey& key, bool begins) const;
  bool MayLeaveWindow(const WindowStep& of) const;
  // Returns true if `of`, a step before `step`, cannot be completed; see SkipStepsBefore.
  bool CannotComplete(const WindowStep& of, uint32_t rank, uint64_t step, bool resumes) const;

  LayerRules rules_;
  std::map<uint64_t, WindowStep> steps_;
  std::vector<WindowStep> owed_updates_;
  uint64_t floor_ = 0;
  uint64_t opens_from_ = 0;
  StepId last_id_ = 0;
};

}  // namespace precondor

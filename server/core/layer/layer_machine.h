// SPDX-License-Identifier: Apache-2.0
// The protocol of one layer of a session as a state machine. It decides which contributions count, when a step's
// contributions are complete, in which order updates and answers are made, and which ranks must begin again. It has no
// lock, thread, clock, payload or journal; LayerDriver feeds it events and carries out its effects.
// docs/develop/protocol.md has the rules, tests/transcripts an example of each.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "server/core/layer/layer_events.h"
#include "server/core/layer/rank_progress.h"
#include "server/core/layer/step_window.h"

namespace precondor {

// The oldest step of a session that waits for contributions, and the ranks that it waits for.
struct Stragglers {
  uint64_t step = 0;
  std::set<uint32_t> ranks;
};

// The state machine of one layer. A value type: copies are independent. Not thread-safe. Invariants:
// - Work is done in one order: by step, and in a step statistics before gradient. So the factor version that a step
//   sees is a function of the step alone.
// - The contributors of a sealed phase never change. Its answer is made once and kept until the step is retired.
// - A step's first contribution fixes the step's mode. In first order there are no statistics and the answer is the
//   average, IDENTITY.
// - The journal has everything that a rank can learn before the rank does: an Append effect precedes the effect that
//   shows the result.
class LayerMachine {
 public:
  // `members` are those of `epoch`. Members that began after step 0 may have sent nothing to any shard generation yet.
  LayerMachine(const LayerRules& rules, uint64_t epoch, uint64_t rollback_epoch, absl::Span<const Member> members);

  // Takes an event and returns its effects. This is the only way to change the state.
  Effects Step(const LayerEvent& event);

  // Returns the refusal that the contribution would get now, before memory is reserved for its payload. The checks are
  // those of ContributionArrived, on the same state; NOT_ACTIVE is left to it, because the contribution itself may end
  // that. Errors: those of StepWindow::Check; DATA_LOSS (STATE_LOST) if the rank must begin again because the shard has
  // lost factors; or UNAVAILABLE (FUTURE_EPOCH) or FAILED_PRECONDITION (STALE_EPOCH) for another epoch.
  absl::Status Check(const ContributionHeader& header) const;
  // See StepWindow::FirstKept.
  uint64_t first_kept() const;
  // Number of unanswered gradients and of updates that are due.
  int64_t in_flight() const { return window_.in_flight() + delivering_; }
  // Adds the ranks for which an open phase has waited since `since` or longer. `stragglers` keeps the oldest such step:
  // an older step here replaces it, and later steps are ignored.
  void AddStragglers(absl::Time since, Stragglers& stragglers) const;
  // Returns the ranks whose statistics or gradient the step lacks although another rank has sent its own.
  std::set<uint32_t> MissingRanks(uint64_t step) const;
  const StepWindow& window() const { return window_; }
  const RankProgress& ranks() const { return ranks_; }
  template <typename H>
  friend H AbslHashValue(H h, const LayerMachine& machine) {
    h = H::combine(std::move(h), machine.window_, machine.ranks_, machine.epoch_, machine.rollback_epoch_);
    return H::combine(std::move(h), machine.factors_.version, machine.factors_.restored_updates, machine.awake_,
                      machine.delivering_, machine.goes_on_at_.value_or(~uint64_t{0}));
  }
  // Returns the epoch of the job's last rollback to an earlier step; 0 means none.
  uint64_t rollback_epoch() const { return rollback_epoch_; }

 private:
  void On(const ContributionArrived& event, Effects& effects);
  void On(const AnswerRequested& event, Effects& effects);
  void On(const RankResumed& event, Effects& effects);
  void On(const FactorsRequested& event, Effects& effects);
  void On(const EpochEnded& event, Effects& effects);
  void On(const EpochBegan& event, Effects& effects);
  void On(const Closed& event, Effects& effects);
  void On(const WorkerReady& event, Effects& effects);
  void On(const FactorsNeeded& event, Effects& effects);
  void On(const UpdateDone& event, Effects& effects);
  void On(const AnswerDone& event, Effects& effects);
  void On(const AnswerVisible& event, Effects& effects);
  void On(const AnswerDelivered& event, Effects& effects);
  void On(const FactorsReplaced& event, Effects& effects);
  void On(const ReplayFinished& event, Effects& effects);

  const LayerRules& rules() const { return window_.rules(); }
  absl::Status CheckEpoch(const ContributionKey& key) const;
  // Returns DATA_LOSS (STATE_LOST) if the rank must begin again because the shard has lost factors, and UNAVAILABLE
  // (NOT_ACTIVE) if it has done so and another rank has not.
  absl::Status CheckNotLost(const ContributionKey& key) const;
  // Handles a RESUME of a rank that knows factors which the shard has lost, or the next RESUMEs after one: the ranks go
  // on with the factors that exist if all lack the answers from one step on. Otherwise some have an answer that the
  // others cannot get any more, and all begin again. `lost` counts the updates that this rank knows and the shard does
  // not.
  void NoteLoss(const RankResumed& event, uint64_t lost, Effects& effects);
  // Returns true if a rank that has told nothing of its answers asks, by this contribution, for one that others have
  // from before a loss.
  bool AsksForLostAnswer(ContributionKind kind, const ContributionKey& key) const;
  // Makes all ranks begin again, and refuses what waits.
  void LoseRanks(const ContributionKey& key, Effects& effects);
  // Returns the errors of CheckNotLost and StepWindow::Check. Stale statistics pass.
  absl::Status CheckStep(ContributionKind kind, const ContributionKey& key, Mode mode) const;
  // Returns DATA_LOSS (STATE_LOST), for ranks that ask for the answer to an incomplete step.
  absl::Status AnswerIsLost(const WindowStep& of) const;
  // Returns true if the step was restored with the shard and a rank has resumed past it without sending its gradient.
  // No rank gets the step's answer then.
  bool IsPassed(const WindowStep& of) const;
  // Returns ABORTED (STALE_STEP), for ranks that ask for the answer to a step for which IsPassed is true.
  absl::Status Passed(const WindowStep& of) const;
  // Returns true for statistics of a step that is never opened again: an earlier shard generation had them, or they are
  // too late.
  bool IsStale(ContributionKind kind, const ContributionKey& key) const;

  // Takes in a contribution. Returns true for a repetition. Sets `work` if the worker has something to do.
  absl::StatusOr<bool> Admit(const ContributionArrived& event, bool& work, Effects& effects);
  // Returns INVALID_ARGUMENT (SHAPE_MISMATCH) if the parts of the ranks have more elements than the gradient, unless
  // some are of earlier processes.
  absl::Status CheckParts(const ContributionArrived& event, const Phase& phase) const;
  // Marks the answers that the rank must have received, because it now sends `kind` of `key`.
  void MarkAnswered(ContributionKind kind, const ContributionKey& key);
  // Handles the first contribution of a replaced rank: the rank sends nothing to the steps before it. Returns true if
  // that may have made work.
  bool NoteBegun(const ContributionKey& key, absl::Time now, Effects& effects);
  // Handles a contribution to `key.step`, or a FETCH, of a replaced rank that holds factors. Returns true if that may
  // have made work.
  bool NoteCatchup(const ContributionKey& key, absl::Time now, Effects& effects);
  // Counts an abstention for the rank, which does not send its statistics of the step. Returns true if the step waited
  // for them.
  bool AbstainFromStatistics(WindowStep& of, uint32_t rank, absl::Time now, Effects& effects);
  // Completes the step for replaced ranks that began after it and so send nothing to it. Returns true if a phase may
  // have been sealed.
  bool CountRanksThatBeganLater(WindowStep& of, absl::Time now, Effects& effects);
  WindowStep& FindOrOpen(uint64_t step, Mode mode, absl::Time now, Effects& effects);
  void SealIfDue(WindowStep& of, ContributionKind kind, absl::Time now, Effects& effects);
  void Wake(Effects& effects);

  // Work that one phase has for the worker.
  enum class Offer : uint8_t { kNothing, kWork, kBlocked };  // kBlocked: the phase has its turn, but cannot be done yet
  bool OfferAccumulation(Effects& effects);
  Offer OfferUpdate(WindowStep& of, Effects& effects);
  Offer OfferAnswer(WindowStep& of, Effects& effects);
  void OfferPendingUpdate(WindowStep& of, Effects& effects);

  StepWindow window_;
  RankProgress ranks_;
  uint64_t epoch_;
  uint64_t rollback_epoch_;
  struct {
    uint64_t version = 0;           // of the current factors
    uint64_t restored_updates = 0;  // updates of the journal that `version` does not include yet
  } factors_;
  // Set after a loss until the next answer is given: the step with which all ranks go on; see NoteLoss.
  std::optional<uint64_t> goes_on_at_;
  bool awake_ = false;      // the worker will feed WorkerReady
  int64_t delivering_ = 0;  // answers that are being delivered
};

}  // namespace precondor

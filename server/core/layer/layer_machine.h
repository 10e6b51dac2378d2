// SPDX-License-Identifier: Apache-2.0
// The protocol of one layer of a session as a state machine: which contributions count, when a step's contributions are
// complete, in which order updates and answers are made, and who has to begin again. It has no lock, thread, clock,
// payload or journal; LayerDriver feeds it events and carries its effects out. docs/protocol.md has the rules,
// tests/transcripts an example of each.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "server/core/layer/layer_events.h"
#include "server/core/layer/layer_rules.h"
#include "server/core/layer/rank_progress.h"
#include "server/core/layer/step_window.h"

namespace precondor {

// Ranks that hold up a session's oldest step.
struct Stragglers {
  uint64_t step = 0;
  std::set<uint32_t> ranks;
};

// A value: a copy goes its own way. Not thread-safe. Invariants:
// - Work is done in one order: by step, and in a step statistics before gradient (staleness 0) or gradient before
//   statistics (staleness 1). So the factor version that a step sees is a function of the step alone.
// - A sealed phase never changes who contributed; its answer is made once and kept until the step is retired.
// - A step's first contribution fixes its mode here. In first order there are no statistics and the answer is the
//   average, IDENTITY.
// - What a rank can have been told is in the journal before: an Append effect comes before the effect that shows it.
class LayerMachine {
 public:
  // `members`: of the epoch. Those that began after step 0 may have sent nothing to any shard generation yet.
  LayerMachine(const LayerRules& rules, uint64_t epoch, uint64_t rollback_epoch, absl::Span<const Member> members);

  // The only way to change the state.
  Effects Step(const LayerEvent& event);

  // Whether the contribution may come now. ABORTED STALE_STEP, FAILED_PRECONDITION STEP_TOO_FAR_AHEAD or MODE_CONFLICT,
  // DATA_LOSS STATE_LOST, or the epoch's errors.
  absl::Status Check(const ContributionHeader& header) const;
  // See StepWindow::FirstKept.
  uint64_t first_kept() const;
  // Unanswered gradients, and updates that are due.
  int64_t in_flight() const { return window_.in_flight() + delivering_; }
  // Ranks that others have waited for since before `since`, if their step is not after that of `stragglers`.
  void AddStragglers(absl::Time since, Stragglers& stragglers) const;
  const StepWindow& window() const { return window_; }
  const RankProgress& ranks() const { return ranks_; }
  template <typename H>
  friend H AbslHashValue(H h, const LayerMachine& machine) {
    h = H::combine(std::move(h), machine.window_, machine.ranks_, machine.epoch_, machine.rollback_epoch_);
    return H::combine(std::move(h), machine.factors_.version, machine.factors_.restored_updates, machine.factors_.held,
                      machine.awake_, machine.delivering_);
  }
  // The epoch with which the job last rolled back to an earlier step; 0: none.
  uint64_t rollback_epoch() const { return rollback_epoch_; }

 private:
  void On(const ContributionArrived& event, Effects& effects);
  void On(const AverageArrived& event, Effects& effects);
  void On(const AnswerRequested& event, Effects& effects);
  void On(const RankResumed& event, Effects& effects);
  void On(const FactorsRequested& event, Effects& effects);
  void On(const EpochEnded& event, Effects& effects);
  void On(const EpochBegan& event, Effects& effects);
  void On(const Closed& event, Effects& effects);
  void On(const DeadlinePassed& event, Effects& effects);
  void On(const WorkerReady& event, Effects& effects);
  void On(const FactorsNeeded& event, Effects& effects);
  void On(const UpdateDone& event, Effects& effects);
  void On(const AnswerDone& event, Effects& effects);
  void On(const AnswerVisible& event, Effects& effects);
  void On(const AnswerDelivered& event, Effects& effects);
  void On(const FactorsReplaced& event, Effects& effects);
  void On(const ReplayFinished& event, Effects& effects);

  absl::Status CheckEpoch(const ContributionKey& key) const;
  // DATA_LOSS STATE_LOST for ranks that have to begin again; ranks that have done so wait for them.
  absl::Status CheckNotLost(const ContributionKey& key) const;
  absl::Status CheckStep(const ContributionKey& key, Mode mode) const;
  // What ranks get that ask for the answer to an incomplete step: DATA_LOSS STATE_LOST.
  absl::Status AnswerIsLost(const WindowStep& of) const;
  // The step came back with the shard, and a rank that goes on sends no gradient of it any more: no rank gets its
  // answer.
  bool IsPassed(const WindowStep& of) const;
  // What ranks get that ask for it: ABORTED STALE_STEP.
  absl::Status Passed(const WindowStep& of) const;
  // Statistics of a step that is not opened any more: a lost shard generation had them, or they are too late for it.
  bool IsStale(ContributionKind kind, const ContributionKey& key) const;

  // Takes a contribution in: true for a repetition. `work`: the worker has something to do for it.
  absl::StatusOr<bool> Admit(const ContributionArrived& event, bool& work, Effects& effects);
  absl::Status Admit(const AverageArrived& event, Effects& effects);
  // The rank has the answers that what it now sends shows.
  void MarkAnswered(ContributionKind kind, const ContributionKey& key);
  // A replaced rank sends its first contribution: it has passed what lies before. True when that may have made work.
  bool NoteBegun(const ContributionKey& key, absl::Time now, Effects& effects);
  // A replaced rank that holds factors sends something of `key.step`, or fetches. True when that may have made work.
  bool NoteCatchup(const ContributionKey& key, absl::Time now, Effects& effects);
  // The rank's statistics of the step do not come any more. True when it had not contributed.
  bool AbstainFromStatistics(WindowStep& of, uint32_t rank, absl::Time now, Effects& effects);
  // Replaced ranks that have begun after the step send nothing to it. True when a phase may have been sealed.
  bool CountRanksThatBeganLater(WindowStep& of, absl::Time now, Effects& effects);
  WindowStep& FindOrOpen(uint64_t step, Mode mode, absl::Time now, Effects& effects);
  void SealIfDue(WindowStep& of, ContributionKind kind, absl::Time now, Effects& effects);
  void Wake(Effects& effects);

  // What one phase offers the worker.
  enum class Offer : uint8_t { kNothing, kWork, kBlocked };  // kBlocked: its turn has come and it cannot be done yet
  bool OfferAccumulation(Effects& effects);
  Offer OfferUpdate(WindowStep& of, Effects& effects);
  Offer OfferAnswer(WindowStep& of, Effects& effects);
  void OfferPendingUpdate(WindowStep& of, Effects& effects);

  LayerRules rules_;
  StepWindow window_;
  RankProgress ranks_;
  uint64_t epoch_;
  uint64_t rollback_epoch_;
  struct {
    bool held = false;              // there are factors
    uint64_t version = 0;           // of the factors as they are
    uint64_t restored_updates = 0;  // of the journal, which `version` lacks yet
  } factors_;
  bool awake_ = false;      // the worker is going to say WorkerReady
  int64_t delivering_ = 0;  // answers that are on their way to the requests
};

}  // namespace precondor

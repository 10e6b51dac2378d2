// SPDX-License-Identifier: Apache-2.0
// One layer of a session: gathers each step's contributions, seals them, and has the strand update the factors and
// precondition the gradients, in step order.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "server/core/contribution.h"
#include "server/core/layer_journal.h"
#include "server/core/layer_replay.h"
#include "server/core/layer_worker.h"
#include "server/core/session_context.h"
#include "server/core/shard_control.h"
#include "server/core/step_slot.h"

namespace precondor {

// Thread-safe. Invariants:
// - Work is done in one order: by step, and in a step statistics before gradient (staleness 0) or gradient before
//   statistics (staleness 1). So the factor version that a step sees is a function of the step alone.
// - At most window_steps + 1 slots exist; the oldest of them may only be waiting for its update.
// - A sealed phase never changes who contributed; its answer is made once and kept until the step is retired.
// - A step's first contribution fixes its mode here. In first order there are no statistics and the answer is the
//   average, IDENTITY.
// Lock order: mu_ is a leaf. No callback, post or arithmetic happens under it.
class LayerPipeline : public std::enable_shared_from_this<LayerPipeline> {
 public:
  // `held`: the layer begins with fresh factors; otherwise it has none. Errors: those of Method::MakeState.
  static absl::StatusOr<std::shared_ptr<LayerPipeline>> Create(std::shared_ptr<SessionContext> session, uint32_t layer,
                                                               const SessionInstall& install, bool held);

  // Whether the contribution may come at its step, in its mode. ABORTED STALE_STEP, FAILED_PRECONDITION
  // STEP_TOO_FAR_AHEAD or MODE_CONFLICT, or the epoch's errors.
  absl::Status CheckStep(const ContributionHeader& header) const;

  // The header has passed every check that needs no payload. `ack` and `result` as in Shard.
  void SubmitStatistics(const ContributionHeader& header, Payload payload, const AckFn& ack);
  void SubmitGradient(const ContributionHeader& header, Payload payload, const AckFn& ack, ResultFn result);
  // See Shard.
  absl::Status SubmitReduced(ReducedGradient gradient, ResultFn result);

  // A rank has come from another memory, which answered it with factors of `factor_version`, and sends no gradient of
  // steps before `key.step` again: those that this memory does not know are over. Where updates are missing here and
  // several ranks get each answer, all of them have to begin again: MEMORY_LOST, as for whatever they send until then.
  // Otherwise the epoch's errors.
  absl::Status Resume(const ContributionKey& key, uint64_t factor_version);

  // Gives `result` the factors as they are, updates that are due from the journal included; see Shard::Fetch.
  void Fetch(const ContributionKey& key, ResultFn result);

  // Takes no contribution of an epoch before `epoch` any more; waiting results get `why`. Returns the first step from
  // which on the layer keeps all. Nothing else when `epoch` is not new.
  uint64_t EndEpoch(uint64_t epoch, const absl::Status& why);
  // Goes on with `epoch`, which EndEpoch has named; factors stay. When the job goes back to a step every slot goes.
  // Otherwise they stay, so that processes that took ranks over (`replaced`) get the answers that the others got, and
  // none retires before they have. What they have passed ends with their first contribution.
  void BeginEpoch(uint64_t epoch, std::optional<uint64_t> goes_back_to, absl::Span<const Member> replaced);
  // Drops every slot, for good; waiting results get `why`.
  void Close(const absl::Status& why);
  // Gives a layer that has no factors some, after what is queued: those of `release`, or, with 0, fresh ones.
  void SetState(std::unique_ptr<LayerState> state, uint64_t release);
  // Takes the layer's factors away, after what is queued; then calls `done` on the strand with what LayerState::Save
  // said of them, or NotFound: there is no journal that could keep them.
  using ReleasedFn = std::function<void(absl::StatusOr<std::string> state)>;
  void ReleaseState(uint64_t release, ReleasedFn done);

  // Gives a layer that nobody has sent anything to the factors of a snapshot as of `step`; its image goes to the
  // journal.
  void Restore(std::unique_ptr<LayerState> state, uint64_t step);
  // Gives up on statistics that are overdue at `now`.
  void SealOverdue(absl::Time now);
  // Adds what the layer has waited for since before `since`: ranks whose contributions to a step others have sent.
  void AddLaggards(absl::Time since, Laggards& laggards) const;

  // Coming back, before anything else: the layer's image, its records in order, then FinishReplay. Errors: those of
  // LayerReplay.
  absl::Status Replay(const LayerImage& image) { return replay().Load(image); }
  absl::Status Replay(UpdateRecord record) { return replay().Add(std::move(record)); }
  absl::Status Replay(const FailedUpdateRecord& record) { return replay().Add(record); }
  absl::Status Replay(const PlanRecord& record) { return replay().Add(record); }
  absl::Status Replay(const FactorsRecord& record) { return replay().Add(record); }
  // The window's steps are there again: sealed statistics wait for their turn, gradients for their contributors.
  void FinishReplay();

  // Tells the observer and `ack` what became of a contribution that carried `bytes`.
  void Acknowledge(ContributionKind kind, int64_t bytes, absl::StatusOr<bool> taken, const AckFn& ack);
  LayerStats stats() const;
  // Not while SetState or ReleaseState may be under way.
  bool has_factors() const { return worker_.has_factors(); }
  uint64_t release() const { return journal_.release(); }
  uint32_t index() const { return layer_; }
  // After FinishReplay, once: factors of release() that the journal may not hold.
  std::optional<std::string> TakeReleased() { return std::exchange(released_, std::nullopt); }
  const LayerSpec& spec() const { return session_->spec.layers[layer_]; }

 private:
  LayerPipeline(std::shared_ptr<SessionContext> session, uint32_t layer, const SessionInstall& install,
                std::unique_ptr<LayerState> state);

  using Slots = std::map<uint64_t, std::shared_ptr<StepSlot>>;
  enum class WorkKind : uint8_t { kNone, kFold, kUpdate, kAnswer, kExpire };
  struct Work {
    WorkKind kind = WorkKind::kNone;
    std::shared_ptr<StepSlot> slot = {};
    std::vector<Vote> votes = {};
    std::string skip_reason = {};        // kAnswer: not empty when nobody gets a gradient
    std::vector<ResultFn> waiters = {};  // kExpire
    uint64_t began = 0;                  // see LayerStep
    bool logged = false;                 // kUpdate: the votes came from the journal
  };

  // No step before it begins any more: somebody has passed it, or it had been passed when the process before this one
  // was lost.
  uint64_t FirstToOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Statistics of a step that has been passed over: a memory that is lost had them, or they are too late for it.
  bool ComesTooLate(const ContributionHeader& header) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckEpoch(const ContributionKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckStepLocked(const ContributionKey& key, Mode mode) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The same for a step that has no slot yet.
  absl::Status CheckWindow(const ContributionKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Closable(const StepSlot& slot) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Finished(const StepSlot& slot) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  StepSlot& OpenSlot(uint64_t step, Mode mode, std::vector<ResultFn>& retired) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `rank` sends no gradient of steps before `step`: those that lack it end, and none of them begins. `resumes`: it
  // goes on, and has the answers to those that the journal knows of. True when what comes after them may have waited.
  // Nothing of a rank that sends no gradients of the layer.
  bool PassOver(uint32_t rank, uint64_t step, bool resumes, std::vector<ResultFn>& retired)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Here, or by the process before this one.
  bool HasAnswered(uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The slot, of a step before `step`, cannot be completed: see PassOver.
  bool LacksFor(const StepSlot& slot, uint32_t rank, uint64_t step, bool resumes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A rank sends its first contribution since another process took it: it has passed what lies before. True as
  // PassOver.
  bool NoteBegun(const ContributionKey& key, std::vector<ResultFn>& retired) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Where workers have factors: a process that begins again before `step` may still ask for those of now.
  bool IsAwaitedBefore(uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // There too: a rank that has begun after the step sends nothing to it any more. Nobody needs what it would ask for,
  // and in first order nothing else comes from it. True when a phase may have been sealed by it.
  bool CountWhoHasBegunLater(StepSlot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The rank sends something of `step`, or asks for the factors. True when that may have made work.
  bool NoteComing(const ContributionKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // MEMORY_LOST for ranks that have to begin again; those that have are to wait for them.
  absl::Status CheckMemory(const ContributionKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool SendsGradient(uint32_t rank) const;
  // Some steps have no gradient, and so the next one that has may lie any distance ahead.
  bool has_gaps() const;
  // One rank sends the gradients, and gets the answers.
  bool one_answer() const;
  // Ends a gradient phase that nobody completes.
  void RetireGradient(StepSlot& slot, std::vector<ResultFn>& waiters) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Expired() const;
  bool ExpectsStatistics(const StepSlot& slot) const;
  // Takes the slot out of everything but the work on it that the strand has begun.
  void Drop(const std::shared_ptr<StepSlot>& dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropSlots(std::vector<ResultFn>& waiters) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Takes a contribution in: true for a repetition. `work`: the strand has something to do for it, a gradient to add up
  // or a phase that it sealed. Errors: those of CheckStep, ABORTED CONFLICT.
  // `retired` get what Expired says.
  absl::StatusOr<bool> Put(const ContributionHeader& header, Standing standing, uint64_t digest, Vote vote, bool& work,
                           std::vector<ResultFn>& retired);
  // The same for what SubmitReduced has.
  absl::Status PutReduced(ReducedGradient& gradient, bool& work, std::vector<ResultFn>& retired);
  // What the rank now sends shows which answers it has.
  void Settle(ContributionKind kind, const ContributionKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SealIfDue(StepSlot& slot, ContributionKind kind, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AwaitResult(const ContributionKey& key, ResultFn result);

  // Has the strand look for work, unless it will anyway.
  void Schedule();
  void Run();
  void Update(Work& work);
  void Answer(Work& work);
  void Refuse(StepSlot& slot, const absl::Status& why);
  Work NextWork();
  // Updates from the journal belong to the factors of their time, whose turn they would wait for in vain.
  std::vector<Work> TakeRestoredUpdates();
  // The work that one phase offers now. Blocked: its turn has come and it cannot be done yet.
  struct Turn {
    Work work;
    bool blocked = false;
  };
  Turn StatisticsTurn(const std::shared_ptr<StepSlot>& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Turn GradientTurn(const std::shared_ptr<StepSlot>& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // On the strand: gives the layer these factors, or none, after restored updates; the records follow.
  void ReplaceState(std::unique_ptr<LayerState> state, uint64_t release);
  void Show(const LayerWorker::StateView& view) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `restored`: the update is one of restored_updates_.
  void FinishUpdate(StepSlot& slot, const LayerWorker::UpdateOutcome& outcome, bool restored);
  void FinishGradient(StepSlot& slot, LayerWorker::Answer answer);
  LayerReplay& replay();
  bool PassedOver(const StepSlot& slot) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Const after construction.
  const std::shared_ptr<SessionContext> session_;
  const uint32_t layer_;
  Executor& executor_;  // of the layer's device
  const uint64_t strand_;

  // Used on the strand alone.
  LayerWorker worker_;
  LayerJournal journal_;
  std::unique_ptr<LayerReplay> replay_;  // until FinishReplay
  std::optional<std::string> released_;  // from there until TakeReleased

  mutable Mutex mu_;
  uint64_t epoch_ ABSL_GUARDED_BY(mu_);
  uint64_t began_ ABSL_GUARDED_BY(mu_);           // see LayerStep
  uint64_t floor_ ABSL_GUARDED_BY(mu_) = 0;       // steps below it are retired
  uint64_t opens_from_ ABSL_GUARDED_BY(mu_) = 0;  // no step below it begins here: somebody has passed it
  Slots slots_ ABSL_GUARDED_BY(mu_);
  // Updates of the journal whose steps were dropped before their turn: they are part of the factors all the same.
  std::vector<std::shared_ptr<StepSlot>> owed_updates_ ABSL_GUARDED_BY(mu_);
  // Ranks that processes took over which have yet to show where they begin.
  std::set<uint32_t> to_begin_ ABSL_GUARDED_BY(mu_);
  std::set<uint32_t> heard_ ABSL_GUARDED_BY(mu_);  // ranks that have sent something to this memory
  // Where workers have factors: of the ranks that processes took over, where each begins and what it has come to.
  struct Coming {
    uint64_t first_step = 0;
    uint64_t step = 0;
    bool begun = false;  // it has sent something: until then it may be told to begin earlier
  };
  std::map<uint32_t, Coming> coming_ ABSL_GUARDED_BY(mu_);
  std::set<uint32_t> disowned_ ABSL_GUARDED_BY(mu_);  // ranks that know factors which are lost, until they begin again
  uint64_t restored_updates_ ABSL_GUARDED_BY(mu_) = 0;  // of the journal, that stats_.factor_version lacks yet
  bool held_ ABSL_GUARDED_BY(mu_) = false;              // there are factors
  bool scheduled_ ABSL_GUARDED_BY(mu_) = false;
  LayerStats stats_ ABSL_GUARDED_BY(mu_);
  // Sums and counts behind the means in stats_.
  double update_seconds_ ABSL_GUARDED_BY(mu_) = 0;
  double precondition_seconds_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t updates_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor

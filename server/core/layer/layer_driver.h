// SPDX-License-Identifier: Apache-2.0
// Runs one layer of a session: feeds events to the layer's state machine and carries out the effects that it returns.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "server/core/api/contribution.h"
#include "server/core/api/shard_control.h"
#include "server/core/api/shard_summary.h"
#include "server/core/layer/admission.h"
#include "server/core/layer/layer_events.h"
#include "server/core/layer/layer_journal.h"
#include "server/core/layer/layer_machine.h"
#include "server/core/layer/layer_replay.h"
#include "server/core/layer/layer_worker.h"
#include "server/core/layer/step_data.h"
#include "server/core/resources/session_context.h"

namespace precondor {

// Accumulates the LayerStats of one layer. Not thread-safe: LayerDriver::mu_ guards it.
class LayerCounters {
 public:
  LayerCounters(uint32_t layer, std::string name) {
    stats_.layer = layer;
    stats_.name = std::move(name);
  }

  void CountAccepted(uint64_t accepted) { stats_.accepted += accepted; }
  void CountDuplicate() { ++stats_.duplicates; }
  void CountRejected() { ++stats_.rejected; }
  void CountSealed(uint64_t step) { stats_.last_sealed_step = std::max(stats_.last_sealed_step, step); }
  void CountUpdate(const LayerWorker::UpdateOutcome& outcome);
  void CountAnswer(const GradientResult& answer);
  void Show(const LayerWorker::StateView& view);

  const LayerStats& stats() const { return stats_; }

 private:
  LayerStats stats_;
  // Sums in seconds, and the count, from which the means in stats_ are computed.
  double update_seconds_ = 0;
  double precondition_seconds_ = 0;
  uint64_t updates_ = 0;
};

// Runs one layer of a session. Owns the layer's lock, strand, payloads, factors and journal. A contribution goes
// through Submit -> LayerMachine (under the lock) -> its effects, which wake the strand -> Run, until the machine has
// no work left. layer_driver.cc has the events, layer_effects.cc how each effect is carried out. Thread-safe. Lock
// order: mu_ is taken before BegunSteps::mu_ and no other lock of core. An observer may be called under it, but no
// other callback, post or arithmetic happens under it. The exception is FinishReplay, which may apply updates under it:
// no worker or strand uses the layer at that time.
class LayerDriver : public std::enable_shared_from_this<LayerDriver> {
 public:
  // Creates a layer that has fresh factors. Returns the errors of Method::MakeState.
  static absl::StatusOr<std::shared_ptr<LayerDriver>> Create(std::shared_ptr<SessionContext> session, uint32_t layer,
                                                             const SessionInstall& install);

  // See LayerMachine::Check.
  absl::Status Check(const ContributionHeader& header) const;

  // Submits an admitted contribution. `ack` and `result` are as in ShardDataPlane::Submit.
  void Submit(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result);

  // Handles a RESUME. The rank sends no gradient of a step before `key.step` again, so steps that cannot be completed
  // without one are dropped and not opened again. Returns the number of updates that the rank's last answer included
  // and the factors do not: the rank goes on with older factors. Errors:
  // - DATA_LOSS (STATE_LOST) if updates are missing here and another rank has, or lacks, an answer that this rank does
  //   not. All ranks must then begin again; until a rank has done so, the layer refuses all that it sends with
  //   STATE_LOST. So too if workers hold factors.
  // - UNAVAILABLE (NOT_ACTIVE) if this rank has begun again and another rank must still do so.
  // - UNAVAILABLE (FUTURE_EPOCH) or FAILED_PRECONDITION (STALE_EPOCH) if `key.epoch` is not the layer's epoch.
  absl::StatusOr<uint64_t> Resume(const RankResume& resume);

  // Calls `result` with the layer's current factors, after it has applied the pending updates of the journal. See
  // ShardDataPlane::Fetch.
  void Fetch(const ContributionKey& key, ResultFn result);

  // Ends the epochs before `epoch`: refuses their contributions from now on and ends waiting requests with `why`.
  // Returns the first step from which on the layer keeps everything that a process needs if it begins there. Does
  // nothing else if `epoch` is not later than the layer's epoch.
  uint64_t EndEpoch(uint64_t epoch, const absl::Status& why);
  // Begins an epoch, which a call of EndEpoch has announced. The factors stay. Drops all steps if the job has rolled
  // back in it or in an earlier one that the layer has not heard of. Otherwise the steps stay, so that the processes
  // that took ranks over (`replaced`) get the answers that the other ranks got, and no step retires before they have
  // them.
  void BeginEpoch(const EpochBegan& began);
  // Drops all steps, refuses later contributions and ends waiting requests with `why`.
  void Close(const absl::Status& why);

  // Returns fresh factors for the layer, or the errors of Method::MakeState.
  absl::StatusOr<std::unique_ptr<LayerState>> MakeFactors() const { return session_->MakeState(layer_); }
  // Gives a layer that has had no contribution the factors of a snapshot as of `step`, and its image to the journal.
  void RestoreFactors(std::unique_ptr<LayerState> state, uint64_t step);

  // Gives the journal the layer's image for a snapshot as of `step`, which the session has not begun, after the work
  // that is queued. Calls `done` afterwards, on the strand.
  void GiveFinalImage(uint64_t step, std::function<void()> done);
  // See LayerMachine::AddStragglers.
  void AddStragglers(absl::Time since, Stragglers& stragglers) const;
  // See LayerMachine::MissingRanks.
  std::set<uint32_t> MissingRanks(uint64_t step) const;

  // Returns the object that takes the layer's image and then its records, in order. It is valid until FinishReplay.
  // Precondition: the layer has had no contribution or request; epochs may have ended and begun.
  LayerReplay& replay();
  // Ends the replay and opens the restored steps of the window: sealed statistics wait for their turn, gradients for
  // their contributors.
  void FinishReplay();

  // Counts a contribution that was refused, and reports it to the observer.
  void CountRefusal(ContributionKind kind, const absl::Status& why);
  LayerStats stats() const;
  const LayerSpec& spec() const { return session_->spec.layers[layer_]; }

 private:
  class EffectVisitor;

  LayerDriver(std::shared_ptr<SessionContext> session, uint32_t layer, const SessionInstall& install,
              std::unique_ptr<LayerState> state);

  static void IgnoreReply(const SenderReply&) {}
  // The parts of an event that its effects need, and where they reply to.
  struct Sender {
    absl::FunctionRef<void(const SenderReply&)> reply = IgnoreReply;
    StagedContribution* payload = nullptr;  // of a contribution
    AnswerRequest* request = nullptr;
    uint64_t* updates_lost = nullptr;  // set if updates are lost to a rank that resumes
    SenderReply outcome = {};          // of the machine, until `reply` has it
  };
  // The rest of an event's effects, in order, for the time when mu_ is released.
  struct Rest {
    bool any_effect = false;
    absl::InlinedVector<absl::AnyInvocable<void()>, 4> calls = {};
  };

  // Passes the event to the machine and carries out its effects. Returns false if there are none.
  bool Feed(const LayerEvent& event, Sender sender);
  bool Feed(const LayerEvent& event) { return Feed(event, Sender()); }
  // The two halves of Feed: the machine's decision, and what runs after it. `sender` must live until Finish.
  Rest Begin(const LayerEvent& event, Sender& sender) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static bool Finish(Rest& rest);

  // A contribution as the machine (`status`, `digest`) and the step's data (`contribution`) take it.
  struct Staged {
    ContributionStatus status = ContributionStatus::kAbstained;
    absl::Status refusal = {};  // why the payload is refused; its rank then counts as abstained
    uint64_t digest = 0;
    StagedContribution contribution = {};
  };
  Staged Stage(AdmittedContribution& admitted, Payload payload) const;
  void RequestAnswer(AnswerRequest request);
  // Gives the requests the answer, or their parts of it, and reports that.
  void Give(const GradientResult& answer, std::vector<AnswerRequest>& requests, StepData& data);
  void LogAnswer(uint64_t step, const GradientResult& answer);
  void PostFetch(ResultFn result);
  void Post(absl::AnyInvocable<void(LayerDriver&)> task);

  // The functions below run on the strand. NoteFactorsReplaced also runs in the constructor.
  void Run() {
    while (Feed(WorkerReady{})) {
    }
  }
  void Update(const ApplyUpdate& effect, StepData& data);
  void Answer(const ComputeAnswer& effect, StepData& data, std::vector<StagedContribution> contributions);
  LayerWorker::StateView ShowFactors();
  void NoteFactorsReplaced();
  // Gives the journal the layer's image as of `step`.
  void GiveImage(uint64_t step);

  // Const after construction.
  const std::shared_ptr<SessionContext> session_;
  const uint32_t layer_;
  Executor& executor_;  // of the layer's device
  const uint64_t strand_;

  // Used on the strand alone.
  LayerWorker worker_;
  LayerJournal journal_;
  std::unique_ptr<LayerReplay> replay_;  // null after FinishReplay

  std::atomic<bool> told_of_skip_ = false;  // a skipped step has been logged as a warning

  mutable Mutex mu_;
  LayerMachine machine_ ABSL_GUARDED_BY(mu_);
  StepTable steps_ ABSL_GUARDED_BY(mu_);
  int64_t in_flight_ ABSL_GUARDED_BY(mu_) = 0;  // machine_.in_flight() as last added to ShardContext::in_flight
  LayerCounters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor

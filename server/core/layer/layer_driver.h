// SPDX-License-Identifier: Apache-2.0
// Runs one layer of a session: feeds events to the layer's state machine and carries out the effects that it returns.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "server/core/api/contribution.h"
#include "server/core/api/shard_control.h"
#include "server/core/layer/admission.h"
#include "server/core/layer/layer_counters.h"
#include "server/core/layer/layer_events.h"
#include "server/core/layer/layer_factors.h"
#include "server/core/layer/layer_journal.h"
#include "server/core/layer/layer_machine.h"
#include "server/core/layer/layer_replay.h"
#include "server/core/layer/layer_worker.h"
#include "server/core/layer/step_data.h"
#include "server/core/resources/session_context.h"

namespace precondor {

// Runs one layer of a session. Owns the layer's lock, strand, payloads, factors and journal. A contribution goes
// through Submit* -> LayerMachine (under the lock) -> Perform, which wakes the strand -> Run, until the machine has no
// work left.
// Thread-safe. Lock order: mu_ is taken before BegunSteps::mu_ and no other lock of core. An observer may be called
// under it, but no other callback, post or arithmetic happens under it. The exception is FinishReplay, which may apply
// updates under it: no worker or strand uses the layer at that time.
class LayerDriver : public std::enable_shared_from_this<LayerDriver> {
 public:
  // Creates a layer that has fresh factors if `held`, and no factors otherwise. Returns the errors of
  // Method::MakeState.
  static absl::StatusOr<std::shared_ptr<LayerDriver>> Create(std::shared_ptr<SessionContext> session, uint32_t layer,
                                                             const SessionInstall& install, bool held);

  // See LayerMachine::Check.
  absl::Status Check(const ContributionHeader& header) const;

  // Submit an admitted contribution. `ack` and `result` are as in ShardDataPlane::Submit. layer_push.cc and
  // layer_pull.cc show what happens to the two kinds from submission to acknowledgement, update or answer.
  void SubmitStatistics(AdmittedContribution contribution, Payload payload, const AckFn& ack);
  void SubmitGradient(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result);

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
  // Returns the interface that sets, releases and restores the factors. `*this` must outlive the returned object.
  LayerFactors factors() { return LayerFactors(*this); }

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

  // Tells the observer and `ack` the outcome of a contribution that carried `bytes` payload bytes. `taken` is true for
  // a repetition, and an error if the contribution was refused.
  void Acknowledge(ContributionKind kind, int64_t bytes, absl::StatusOr<bool> taken, const AckFn& ack);
  LayerStats stats() const;
  uint32_t index() const { return layer_; }
  const LayerSpec& spec() const { return session_->spec.layers[layer_]; }

 private:
  friend class LayerFactors;

  // An effect and the parts of `steps_` that it needs. Prepare takes them out under the lock under which the machine
  // decided on the effect.
  struct Task {
    Effect effect;
    std::shared_ptr<StepData> data = {};
    std::vector<AnswerRequest> requests = {};
    std::vector<StagedContribution> contributions = {};
    std::optional<GradientResult> answer = {};
  };
  using Tasks = absl::InlinedVector<Task, 4>;

  LayerDriver(std::shared_ptr<SessionContext> session, uint32_t layer, const SessionInstall& install,
              std::unique_ptr<LayerState> state);

  // Passes the event to the machine and returns its effects. `payload` is that of the event's contribution; null if
  // there is none. FeedLocked takes mu_.
  Tasks Feed(const LayerEvent& event, StagedContribution* payload = nullptr) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Tasks FeedLocked(const LayerEvent& event, StagedContribution* payload = nullptr);
  void Prepare(Task& task, StagedContribution* payload) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  const std::shared_ptr<StepData>& DataOf(StepId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Carries out the effects in order.
  void Perform(Tasks tasks);

  // A contribution as the machine (`status`, `digest`) and the step's data (`contribution`) take it.
  struct Staged {
    ContributionStatus status = ContributionStatus::kAbstained;
    absl::Status refusal = {};  // why the payload is refused; its rank then counts as abstained
    uint64_t digest = 0;
    int64_t bytes = 0;
    StagedContribution contribution = {};
  };
  // The machine's decision. `taken` is true for a repetition, and an error if the contribution is refused. `tasks` are
  // to be performed after the acknowledgement.
  struct Filed {
    absl::StatusOr<bool> taken = false;
    Tasks tasks = {};
  };
  Filed FileContribution(const AdmittedContribution& contribution, Staged& staged);
  static absl::StatusOr<bool> OutcomeOf(const Effect& effect);
  void RequestAnswer(const ContributionKey& key, AnswerRequest request);
  // Returns what the rank gets of the answer, and reports it.
  absl::StatusOr<GradientResult> AnswerFor(const AnswerRequest& request, const GradientResult& answer, StepData& data);

  // The functions below run on the strand. ShowFactors also runs in the constructor.
  void Run();
  void ApplyPendingUpdates() { Perform(FeedLocked(FactorsNeeded{})); }
  void Update(const ApplyUpdate& effect, Task& task);
  void Answer(const ComputeAnswer& effect, Task& task);
  void Deliver(StepId id);
  void ShowFactors();

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
  std::map<StepId, std::shared_ptr<StepData>> steps_ ABSL_GUARDED_BY(mu_);
  int64_t in_flight_ ABSL_GUARDED_BY(mu_) = 0;  // machine_.in_flight() as last added to ShardContext::in_flight
  LayerCounters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor

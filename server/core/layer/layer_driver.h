// SPDX-License-Identifier: Apache-2.0
// One layer of a session at work: feeds what happens to its state machine and carries the machine's effects out.
#pragma once

#include <cstdint>
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
#include "server/core/admission.h"
#include "server/core/contribution.h"
#include "server/core/layer/layer_counters.h"
#include "server/core/layer/layer_events.h"
#include "server/core/layer/layer_factors.h"
#include "server/core/layer/layer_journal.h"
#include "server/core/layer/layer_machine.h"
#include "server/core/layer/layer_replay.h"
#include "server/core/layer/layer_worker.h"
#include "server/core/layer/step_data.h"
#include "server/core/shard/session_context.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// Thread-safe. Owns the layer's lock, strand, payloads, factors and journal. The way of a contribution: Submit* ->
// LayerMachine under the lock -> Perform, which wakes the strand -> Run, until the machine has no work left.
// Lock order: mu_ is a leaf. No callback, post or arithmetic happens under it.
class LayerDriver : public std::enable_shared_from_this<LayerDriver> {
 public:
  // `held`: the layer begins with fresh factors; otherwise it has none. Errors: those of Method::MakeState.
  static absl::StatusOr<std::shared_ptr<LayerDriver>> Create(std::shared_ptr<SessionContext> session, uint32_t layer,
                                                             const SessionInstall& install, bool held);

  // See LayerMachine::Check.
  absl::Status Check(const ContributionHeader& header) const;

  // `ack` and `result` as in ShardDataPlane::Submit. layer_push.cc and layer_pull.cc have the ways of the two.
  void SubmitStatistics(AdmittedContribution contribution, Payload payload, const AckFn& ack);
  void SubmitGradient(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result);
  // See ShardDataPlane.
  absl::Status SubmitReduced(AdmittedAverage admitted, ResultFn result);

  // A rank comes from another shard generation, which answered it with factors of `factor_version`, and sends no
  // gradient of steps before `key.step` again: those that this generation does not know are over. Where updates are
  // missing here and several ranks get each answer, all of them have to begin again: STATE_LOST, as for whatever they
  // send until then. Otherwise the epoch's errors. `begins`: the rank has another process, which begins with
  // `key.step`.
  absl::Status Resume(const ContributionKey& key, uint64_t factor_version, bool begins = false);

  // Gives `result` the factors as they are, updates that are due from the journal included; see ShardDataPlane::Fetch.
  void Fetch(const ContributionKey& key, ResultFn result);

  // Takes no contribution of an epoch before `epoch` any more; waiting results get `why`. Returns the first step from
  // which on the layer keeps all. Nothing else when `epoch` is not new.
  uint64_t EndEpoch(uint64_t epoch, const absl::Status& why);
  // Goes on with `epoch`, which EndEpoch has named; factors stay. When the job goes back to a step, all steps are
  // dropped. Otherwise they stay, so that processes that took ranks over (`replaced`) get the answers that the others
  // got, and none retires before they have.
  void BeginEpoch(uint64_t epoch, std::optional<uint64_t> rollback_step, absl::Span<const Member> replaced);
  // Drops all steps and takes no more; waiting results get `why`.
  void Close(const absl::Status& why);
  // How they are given and taken away, besides updates. `*this` outlives what it returns.
  LayerFactors factors() { return LayerFactors(*this); }

  // Gives up on statistics that are overdue at `now`.
  void SealOverdue(absl::Time now);
  // See LayerMachine.
  void AddStragglers(absl::Time since, Stragglers& stragglers) const;

  // Takes the layer's image and its records in order, before anything else is asked of the layer and until
  // FinishReplay.
  LayerReplay& replay();
  // The window's steps are there again: sealed statistics wait for their turn, gradients for their contributors.
  // Returns factors of LayerFactors::release() that the journal may not hold.
  std::optional<std::string> FinishReplay();

  // Tells the observer and `ack` what became of a contribution that carried `bytes`.
  void Acknowledge(ContributionKind kind, int64_t bytes, absl::StatusOr<bool> taken, const AckFn& ack);
  LayerStats stats() const;
  uint32_t index() const { return layer_; }
  const LayerSpec& spec() const { return session_->spec.layers[layer_]; }

 private:
  friend class LayerFactors;

  // An effect, with what it needs of `steps_`: taken out under the lock under which the machine decided on it.
  struct Task {
    Effect effect;
    std::shared_ptr<StepData> data = {};
    std::vector<ResultFn> requests = {};
    std::vector<StagedContribution> contributions = {};
    std::optional<GradientResult> answer = {};
  };
  using Tasks = absl::InlinedVector<Task, 4>;

  LayerDriver(std::shared_ptr<SessionContext> session, uint32_t layer, const SessionInstall& install,
              std::unique_ptr<LayerState> state);

  // Has the machine take the event. `payload`: that of the event's contribution.
  Tasks Feed(const LayerEvent& event, StagedContribution* payload = nullptr) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Tasks FeedLocked(const LayerEvent& event, StagedContribution* payload = nullptr);
  void Prepare(Task& task, StagedContribution* payload) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  const std::shared_ptr<StepData>& DataOf(StepId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Carries effects out, in their order.
  void Perform(Tasks tasks);

  // A contribution as the machine and the step are to have it.
  struct Staged {
    ContributionStatus status = ContributionStatus::kAbstained;
    absl::Status refusal = {};  // of the payload: its rank counts as one that has abstained
    uint64_t digest = 0;
    int64_t bytes = 0;
    StagedContribution contribution = {};
  };
  // What the machine has made of it: a repetition or not, or why not; and what is to be done when it is acknowledged.
  struct Filed {
    absl::StatusOr<bool> taken = false;
    Tasks tasks = {};
  };
  Filed FileContribution(const AdmittedContribution& contribution, Staged& staged);
  static absl::StatusOr<bool> OutcomeOf(const Effect& effect);
  void RequestAnswer(const ContributionKey& key, ResultFn result);

  // The rest runs on the strand.
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
  std::unique_ptr<LayerReplay> replay_;  // until FinishReplay

  mutable Mutex mu_;
  LayerMachine machine_ ABSL_GUARDED_BY(mu_);
  std::map<StepId, std::shared_ptr<StepData>> steps_ ABSL_GUARDED_BY(mu_);
  int64_t in_flight_ ABSL_GUARDED_BY(mu_) = 0;  // of the machine, as ShardContext::in_flight has it
  LayerCounters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// The events that a layer's state machine takes and the effects that it returns to its driver. All are plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "server/core/api/contribution.h"
#include "server/core/api/shard_control.h"
#include "server/core/api/shard_journal.h"
#include "server/core/layer/contributions.h"

namespace precondor {

// Identifies one opening of a step. A step that the job rolls back to is opened again, with another id. 0 means none.
using StepId = uint64_t;

// --- events ---------------------------------------------------------------------------------------------------------

// A contribution has arrived. The first effect is SenderReply.
struct ContributionArrived {
  ContributionKey key;
  ContributionKind kind = ContributionKind::kStatistics;
  Mode mode = Mode::kSecondOrder;
  ContributionStatus status = ContributionStatus::kPresent;
  uint64_t digest = 0;
  int64_t elements = 0;  // of the parts that a gradient brings in SHARDED
  absl::Time now = {};
};
// The sender of an accepted gradient asks for the answer. The effect is SenderReply (refused), AwaitAnswer or
// GiveAnswer.
struct AnswerRequested {
  ContributionKey key;
};
// A rank has sent a RESUME; see LayerDriver::Resume. The first effect is SenderReply if the RESUME is refused.
struct RankResumed : RankResume {
  absl::Time now = {};
};
// A rank asks for the factors (FETCH). The last effect is SenderReply (refused) or FetchFactors.
struct FactorsRequested {
  ContributionKey key;
  absl::Time now = {};
};
struct EpochEnded {
  uint64_t epoch = 0;  // the next epoch
  absl::Status why;
};
struct EpochBegan {
  uint64_t epoch = 0;
  uint64_t rollback_epoch = 0;  // the job's last rollback: the layer rolls back too unless it has done so; 0: none
  uint64_t rollback_step = 0;   // step to which the job rolled back then
  std::vector<Member> replaced = {};
};
struct Closed {
  absl::Status why;
};
// The worker can do the next piece of work. The effects are those of that piece. If there are none, the worker sleeps
// until WakeWorker.
struct WorkerReady {};
// The factors are about to be read. The effects apply the pending updates of the journal, which the reader expects.
struct FactorsNeeded {};
struct UpdateDone {
  StepId id = 0;
  uint64_t step = 0;
  bool logged = false;    // as in ApplyUpdate
  bool restored = false;  // logged and not empty
  bool failed = false;    // the update was tried and failed; the factors are unchanged
  uint64_t factor_version = 0;
};
struct AnswerDone {
  StepId id = 0;
  Plan plan;  // plan of the computed answer
  // If false, the answer that ComputeAnswer's plan names cannot be made again, and no active rank has received it.
  bool plan_holds = true;
  uint64_t factor_version = 0;
};
// The journal has the plan, so ranks may get the answer. The effect is GiveAnswer, for all requests that wait. The
// driver feeds AnswerDelivered afterwards.
struct AnswerVisible {
  StepId id = 0;
};
struct AnswerDelivered {
  StepId id = 0;
};
struct FactorsReplaced {
  uint64_t factor_version = 0;
};
// A step that replay has restored from the journal.
struct RestoredStep {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  std::optional<Plan> plan;
  bool updated = false;          // the statistics are applied, given up or pending
  bool update_pending = false;   // the journal has the update, and it has yet to be applied
  bool update_is_empty = false;  // the pending update has no contributions to apply
  bool answered = false;         // the journal had the gradient, and the answer has been made again
  bool passed = false;           // the factors are those of a later step, so the answer cannot be made again
};
struct ReplayFinished {
  uint64_t rollback_epoch = 0;
  std::vector<RestoredStep> steps;  // ascending
  uint64_t factor_version = 0;
  absl::Time now = {};
};
using LayerEvent = std::variant<ContributionArrived, AnswerRequested, RankResumed, FactorsRequested, EpochEnded,
                                EpochBegan, Closed, WorkerReady, FactorsNeeded, UpdateDone, AnswerDone, AnswerVisible,
                                AnswerDelivered, FactorsReplaced, ReplayFinished>;

// --- effects --------------------------------------------------------------------------------------------------------

// Each effect is a command to the driver, complete in itself (layer_effects.cc).

// Reply to the sender of the event, with an error if the event is refused.
struct SenderReply {
  absl::Status status;
  bool duplicate = false;  // a repetition
};
// Keep the event's request until the step's answer is given.
struct AwaitAnswer {
  StepId id = 0;
};
// Give the step's answer to the event's request, if it has one, and to all requests that wait.
struct GiveAnswer {
  StepId id = 0;
  uint64_t step = 0;
};
// Give the factors to the event's request.
struct FetchFactors {};
// Add `accepted` contributions to the counters, and note that the step has begun in `mode`.
struct CountAccepted {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  uint64_t accepted = 0;
};
// Keep the payload of the event's contribution as that of `rank`.
struct KeepPayload {
  StepId id = 0;
  ContributionKind kind = ContributionKind::kStatistics;
  uint32_t rank = 0;
};
// Drop the payloads of the step and kind. None of them is needed again.
struct DropPayloads {
  StepId id = 0;
  ContributionKind kind = ContributionKind::kStatistics;
};
// Report that the step and kind are sealed.
struct ReportSealed {
  uint64_t step = 0;
  ContributionKind kind = ContributionKind::kStatistics;
  absl::Duration open_for;
};
// Report, also to the sender, that the shard lacks `lost` updates: the rank was last answered with factors of version
// `answered_with`, and the shard knows version `known`. No rank has been told of `newly` of these before.
struct ReportUpdatesLost {
  uint32_t rank = 0;
  uint64_t lost = 0;
  uint64_t newly = 0;
  uint64_t answered_with = 0;
  uint64_t known = 0;
};
// Report that the answer of a recorded plan cannot be made again.
struct ReportContradiction {
  absl::Status why;
};
// End the requests that now wait for the step's answer with `status`.
struct EndRequests {
  StepId id = 0;
  absl::Status status;
  bool retired = false;  // also drop the answer
};
// Drop all data of the step. Work under way keeps its own reference to the data.
struct DropStep {
  StepId id = 0;
};
// Post the worker to the strand. It then feeds WorkerReady until it gets no effect.
struct WakeWorker {
  bool sealed = false;  // a phase has been sealed, so that work for the device is likely
};

// The effects below are work for the worker. The record of an Append* effect is in the journal before any later effect
// is carried out. BeginStep tells the journal that work on the step begins.
struct BeginStep {
  uint64_t step = 0;
  uint64_t rollback_epoch = 0;
};
struct AccumulateGradient {
  StepId id = 0;
  uint32_t rank = 0;
};
// The payloads of `ranks`, in this order, become the step's update.
struct AppendUpdate {
  StepId id = 0;
  uint64_t step = 0;
  std::vector<uint32_t> ranks = {};
  bool logged = false;  // the update came from the journal, which has the record
};
// Apply the step's update. The driver feeds UpdateDone afterwards.
struct ApplyUpdate {
  StepId id = 0;
  uint64_t step = 0;
  bool logged = false;  // the update came from the journal
  bool empty = false;   // it has no contributions
};
struct AppendFailedUpdate {
  uint64_t step = 0;
};
// The driver feeds AnswerDone afterwards.
struct ComputeAnswer {
  StepId id = 0;
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  std::vector<uint32_t> ranks;  // ranks whose gradients to add, in this order
  std::string skip_reason;      // if not empty, a rank has no gradient and the answer is SKIP
  std::optional<Plan> plan;     // plan that a rank may have been answered with before the shard came back
};
struct AppendPlan {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  Plan plan;
};
// The driver feeds AnswerVisible afterwards.
struct DeliverAnswer {
  StepId id = 0;
};

using Effect = std::variant<SenderReply, AwaitAnswer, GiveAnswer, FetchFactors, CountAccepted, KeepPayload,
                            DropPayloads, ReportSealed, ReportUpdatesLost, ReportContradiction, EndRequests, DropStep,
                            WakeWorker, BeginStep, AccumulateGradient, AppendUpdate, ApplyUpdate, AppendFailedUpdate,
                            ComputeAnswer, AppendPlan, DeliverAnswer>;
// In the order in which the driver carries them out, and so in which they become visible.
using Effects = absl::InlinedVector<Effect, 4>;

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// What can happen to a layer, and what the layer's state machine has its driver do about it. Values alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "server/core/contribution.h"
#include "server/core/layer/contributions.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_journal.h"

namespace precondor {

// Names one opening of a step. A step that the job rolls back to is opened again, with another id. 0: none.
using StepId = uint64_t;

// --- events ---------------------------------------------------------------------------------------------------------

// Effects: one Acknowledge or Refuse comes first.
struct ContributionArrived {
  ContributionKey key;
  ContributionKind kind = ContributionKind::kStatistics;
  Mode mode = Mode::kSecondOrder;
  ContributionStatus status = ContributionStatus::kPresent;
  uint64_t digest = 0;
  absl::Time now = {};
};
// The gradients of all ranks, which have averaged them by a communicator. Effects as above; `key.rank` is unused.
struct AverageArrived {
  ContributionKey key;
  Mode mode = Mode::kSecondOrder;
  std::vector<ContributionStatus> statuses;  // by rank
  absl::Time now = {};
};
// The sender of an accepted gradient wants the answer. Effects: Refuse, AwaitAnswer or GiveAnswer.
struct AnswerRequested {
  ContributionKey key;
};
// See LayerDriver::Resume. Effects: Refuse for an error.
struct RankResumed {
  ContributionKey key;
  uint64_t factor_version = 0;
  bool begins = false;  // a process that has taken the rank over begins with the step
  absl::Time now = {};
};
// A rank asks for the factors. Effects: Refuse or FetchFactors.
struct FactorsRequested {
  ContributionKey key;
  absl::Time now = {};
};
struct EpochEnded {
  uint64_t epoch = 0;  // the next one
  absl::Status why;
};
struct EpochBegan {
  uint64_t epoch = 0;
  std::optional<uint64_t> rollback_step = {};
  std::vector<Member> replaced = {};
};
struct Closed {
  absl::Status why;
};
struct DeadlinePassed {
  absl::Time now = {};
};
// The worker can do the next piece of work. Effects: those of that piece; none: the worker sleeps until WakeWorker.
struct WorkerReady {};
// The factors are about to be read or replaced: updates from the journal belong to the factors of their time and would
// never get their turn. Effects: these updates.
struct FactorsNeeded {};
struct UpdateDone {
  StepId id = 0;
  uint64_t step = 0;
  bool logged = false;    // as in ApplyUpdate
  bool restored = false;  // as in ApplyUpdate
  bool failed = false;    // the update was tried, and left the factors as they were
  bool held = false;      // there are factors
  uint64_t factor_version = 0;
};
struct AnswerDone {
  StepId id = 0;
  Plan plan;               // what the answer is
  bool plan_holds = true;  // false: ComputeAnswer's plan cannot be kept, and no rank that takes part knows it
  bool held = false;
  uint64_t factor_version = 0;
};
// The journal has the plan: the answer can be shown. Effects: GiveAnswer, to all requests that wait. Then
// AnswerDelivered.
struct AnswerVisible {
  StepId id = 0;
};
struct AnswerDelivered {
  StepId id = 0;
};
struct FactorsReplaced {
  bool held = false;
  uint64_t factor_version = 0;
};
// The journal's records have been read. Comes before any other event.
struct RestoredStep {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  std::optional<Plan> plan;
  bool updated = false;          // its statistics are in the factors, or given up, or pending
  bool update_pending = false;   // the update is in the log and has yet to be applied
  bool update_is_empty = false;  // pending, and has no contributions to apply
};
struct ReplayFinished {
  uint64_t rollback_epoch = 0;
  std::vector<RestoredStep> steps;  // ascending
  bool held = false;
  uint64_t factor_version = 0;
  absl::Time now = {};
};
using LayerEvent = std::variant<ContributionArrived, AverageArrived, AnswerRequested, RankResumed, FactorsRequested,
                                EpochEnded, EpochBegan, Closed, DeadlinePassed, WorkerReady, FactorsNeeded, UpdateDone,
                                AnswerDone, AnswerVisible, AnswerDelivered, FactorsReplaced, ReplayFinished>;

// --- effects --------------------------------------------------------------------------------------------------------

// To the sender of the event.
struct Acknowledge {
  bool duplicate = false;
};
struct Refuse {
  absl::Status status;
};
struct AwaitAnswer {
  StepId id = 0;
};
struct GiveAnswer {
  StepId id = 0;
  uint64_t step = 0;
};
struct FetchFactors {};
// `accepted` contributions count for a step in `mode`.
struct CountAccepted {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  uint64_t accepted = 0;
};
// A rank's payload is needed later; AverageArrived: that of all.
struct KeepPayload {
  StepId id = 0;
  ContributionKind kind = ContributionKind::kStatistics;
  uint32_t rank = 0;
};
// No payload of the step and kind is needed any more.
struct DropPayloads {
  StepId id = 0;
  ContributionKind kind = ContributionKind::kStatistics;
};
// All contributions of the step and kind are in, or the deadline has passed and `given_up` says why.
struct ReportSealed {
  uint64_t step = 0;
  ContributionKind kind = ContributionKind::kStatistics;
  absl::Duration open_for;
  std::string given_up;
};
struct ReportUpdatesLost {
  uint32_t rank = 0;
  uint64_t lost = 0;
  uint64_t answered_with = 0;
  uint64_t known = 0;
};
struct ReportContradiction {
  absl::Status why;
};
// Requests that wait for the step's answer get `status`. No other request comes to wait for it.
struct EndRequests {
  StepId id = 0;
  absl::Status status;
  bool retired = false;  // nor is the answer kept
};
// Nothing of the step is needed any more, except by work that is under way.
struct DropStep {
  StepId id = 0;
};
// Post the worker, which then says WorkerReady until it gets no effect.
struct WakeWorker {};

// The worker's effects. Append* go to the journal before what comes after them.
struct BeginStep {
  uint64_t step = 0;
  uint64_t rollback_epoch = 0;
};
struct AccumulateGradient {
  StepId id = 0;
  uint32_t rank = 0;
};
struct AppendUpdate {
  StepId id = 0;
  uint64_t step = 0;
  bool logged = false;  // the journal has the record: the contributions came from there
};
// Then UpdateDone.
struct ApplyUpdate {
  StepId id = 0;
  uint64_t step = 0;
  std::vector<uint32_t> ranks;  // whose payloads to apply, in this order
  bool logged = false;          // apply those of the journal's record in their place
  bool restored = false;        // logged, and not empty
};
struct AppendFailedUpdate {
  uint64_t step = 0;
};
// Then AnswerDone.
struct ComputeAnswer {
  StepId id = 0;
  Mode mode = Mode::kSecondOrder;
  std::vector<uint32_t> ranks;  // whose gradients to add, in this order
  std::string skip_reason;      // not empty: at least one rank has no gradient, and the answer is SKIP
  std::optional<Plan> plan;     // what a rank may have been answered before the shard came back
};
struct AppendPlan {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  Plan plan;
};
// Then AnswerVisible.
struct DeliverAnswer {
  StepId id = 0;
};

using Effect = std::variant<Acknowledge, Refuse, AwaitAnswer, GiveAnswer, FetchFactors, CountAccepted, KeepPayload,
                            DropPayloads, ReportSealed, ReportUpdatesLost, ReportContradiction, EndRequests, DropStep,
                            WakeWorker, BeginStep, AccumulateGradient, AppendUpdate, ApplyUpdate, AppendFailedUpdate,
                            ComputeAnswer, AppendPlan, DeliverAnswer>;
// In the order in which they become visible.
using Effects = absl::InlinedVector<Effect, 4>;

}  // namespace precondor

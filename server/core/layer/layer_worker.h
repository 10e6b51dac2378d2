// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one layer: reduces contributions, updates the factors, preconditions gradients.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "server/core/layer/step_data.h"
#include "server/core/shard/session_context.h"

namespace precondor {

// One thread at a time: the layer's strand. Failures of device or method never leave here as errors of the plan: an
// update that fails leaves the last good factors, a precondition that fails answers IDENTITY with the reason.
class LayerWorker {
 public:
  LayerWorker(SessionContext& session, uint32_t layer, std::unique_ptr<LayerState> state);

  // What LayerStats shows of the state.
  struct StateView {
    bool held = false;  // it has factors
    uint64_t version = 0;
    int64_t bytes = 0;
    LayerState::Summary summary;
  };
  struct UpdateOutcome {
    absl::Status status;  // of the update; OK as well when there were no contributions
    bool attempted = false;
    bool decomposition_failed = false;  // an update that succeeded and left the last good decomposition
    bool reset = false;                 // and gave the factors up with it
    absl::Duration took;
    StateView state;
    std::optional<SealedUpdate> update;  // one that succeeded, where workers have factors
  };
  struct Answer {
    GradientResult result;
    bool preconditioned = false;
    absl::Duration took;
    StateView state;
  };

  // One step's statistics, contributions in rank order; none skips the update.
  UpdateOutcome Update(std::vector<StagedContribution> contributions);

  // Adds a gradient to the step's sum; in rank order.
  void Accumulate(StepData& data, StagedContribution contribution);
  // Answers a sealed gradient phase: the contributions not yet folded, in rank order.
  Answer Precondition(StepData& data, std::vector<StagedContribution> contributions);
  // Answers a sealed phase of pulls: what the step's update has made of the factors.
  Answer PublishUpdate(const StepData& data);
  // The factors as they are, or IDENTITY and the reason where there are none. Unavailable when they cannot be read now.
  absl::StatusOr<GradientResult> Fetch();

  // The answer of a step that a rank had no gradient for; frees what has been added up.
  Answer Skip(StepData& data, AnswerCause cause, std::string reason);

  // Of a method that takes gradients in: the plan's answer was made with gradients that came after those which these
  // factors have, so that it cannot be made again. No rank that takes part holds that answer: Resume makes sure of it.
  bool LacksGradientsOf(const Plan& plan) const;

  // Other factors, or none: updates then do nothing and gradients are answered IDENTITY.
  void SetState(std::unique_ptr<LayerState> state);
  bool has_factors() const { return state_ != nullptr; }
  // Begins with fresh ones. Errors: those of Method::MakeState.
  absl::Status MakeFresh();
  StateView view() const;
  // Those of LayerState.
  absl::StatusOr<std::string> Save() const { return state_->Save(); }
  absl::Status Load(absl::string_view bytes);

 private:
  absl::Status ApplyStatistics(std::vector<StagedContribution>& contributions, UpdateOutcome& outcome);
  absl::StatusOr<SealedUpdate> Seal(const LayerStatistics& merged) const;
  std::string NoFactors() const;
  // Whether what work takes by the clock is what placement may count with.
  bool TimesAreOwn() const;
  // Has the executor do in the background what the factors have deferred.
  void PostDeferredWork();
  // Of a method that takes gradients in: the factors have the step's already, and their last answer is its.
  bool HasTakenIn(const StepData& data) const;
  // OK where the method can be asked.
  absl::Status CheckReady() const;
  AnswerCause CauseOfFailure() const;  // of the method
  // The method's answer to d in u, both on the device. `u_squared`: |u|^2, if not null, and then u is complete.
  absl::Status Compute(ConstMatrixView d, bool taken_in, MatrixView u, Answer& answer, double* u_squared);
  // An error leaves `gradient` as it was. SKIP: it is lost.
  absl::StatusOr<Answer> RunMethod(absl::Span<float> gradient, bool taken_in);
  void NotePreconditioned(Answer& answer) const;
  Answer PreconditionOnDevice(StepData& data);
  absl::StatusOr<Answer> RunMethodOnDevice(ConstMatrixView gradient, bool taken_in, MatrixView u);
  Answer Encode(StepData& data, Answer answer, absl::Span<float> values);

  SessionContext& session_;
  SessionDevice& device_;
  const LayerSpec& spec_;
  const bool single_;  // one rank sends the gradient: nothing to add up
  const uint32_t layer_;
  const Method& method_;
  const size_t cost_entry_;
  std::unique_ptr<LayerState> state_;  // null after a fallback to first order
  // What Save said of state_, for all requests of the same version; null before the first.
  std::shared_ptr<const Payload> saved_;
};

}  // namespace precondor

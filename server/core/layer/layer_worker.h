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
#include "server/core/resources/session_context.h"

namespace precondor {

inline Plan PlanOf(const GradientResult& answer) {
  return {.decision = answer.decision, .factor_version = answer.factor_version, .reason = answer.reason};
}

// Does the arithmetic of one layer. Used by one thread at a time, the layer's strand. A failure of the device or the
// method never fails a step: an update that fails leaves the last good factors, and a precondition that fails answers
// IDENTITY with the reason, or SKIP if the gradient is lost or the method's answers are whole updates.
class LayerWorker {
 public:
  LayerWorker(SessionContext& session, uint32_t layer, std::unique_ptr<LayerState> state);

  // The part of the state that LayerStats shows.
  struct StateView {
    uint64_t version = 0;
    int64_t bytes = 0;
    LayerState::Summary summary;
  };
  struct UpdateOutcome {
    absl::Status status;  // of the update; OK also if there were no contributions
    bool attempted = false;
    bool decomposition_failed = false;  // the last good decomposition stays in use
    bool reset = false;                 // decompositions have failed repeatedly and the factors begin anew
    absl::Duration took;
    std::optional<PublishedUpdate> update;  // set if the update succeeded and workers have factors
  };
  // Ends `expected` when the next task of the layer has begun, or at the next call.
  void Expect(std::shared_ptr<Backend::ExpectedTask> expected) { expected_ = std::move(expected); }

  // Applies one step's statistics. The contributions are in rank order; if there are none, no update is made.
  UpdateOutcome Update(std::vector<StagedContribution> contributions);

  // Adds a gradient to the step's sum. Precondition: gradients are added in rank order.
  void Accumulate(StepData& data, StagedContribution contribution);
  // Makes the average of a sealed gradient phase. `contributions` are those that have not been accumulated, in rank
  // order. For a method that learns from gradients the average is rounded to the session's gradient type, so that a
  // journal of that type restores the state bitwise.
  void Average(StepData& data, std::vector<StagedContribution> contributions);
  // Returns true if Precondition will update the factors with the step's average.
  bool LearnsFrom(const StepData& data) const;
  // Moves the average out of the step, in the session's gradient type; PutBack undoes it. Copies it from the device if
  // it is there. Precondition: LearnsFrom(data). Returns the device's errors.
  absl::StatusOr<StagedContribution> TakeAverage(StepData& data);
  void PutBack(StagedContribution average, StepData& data);
  // Answers with the average that Average has made.
  GradientResult Precondition(StepData& data);
  // Updates the factors again with an average of the journal, and returns the answer as it was.
  GradientResult Relearn(StagedContribution average);
  // Answers a sealed phase of pulls with the result of the step's update.
  GradientResult PublishUpdate(const StepData& data);
  // Returns the current factors, or Unavailable if they cannot be read now.
  absl::StatusOr<GradientResult> Fetch();

  // Returns the answer SKIP for a step without a usable average; frees the gradients that have been added up.
  GradientResult Skip(StepData& data, AnswerCause cause, std::string reason);

  // Returns true if the plan's answer included gradients that these factors do not, so that it cannot be made again.
  // Only a method that learns from gradients can be in this state. No active rank holds that answer, as
  // LayerDriver::Resume ensures.
  bool LacksGradientsOf(const Plan& plan) const;

  // Replaces the factors.
  void SetState(std::unique_ptr<LayerState> state);
  // Replaces the factors by fresh ones. Returns the errors of Method::MakeState.
  absl::Status MakeFresh();
  StateView view() const;
  // See LayerState.
  absl::StatusOr<std::string> Save() const { return state_->Save(); }
  absl::Status Load(absl::string_view bytes);

 private:
  absl::Status ApplyStatistics(std::vector<StagedContribution>& contributions, UpdateOutcome& outcome);
  absl::StatusOr<PublishedUpdate> Seal(const LayerStatistics& merged) const;
  // Posts the deferred work of the factors to the executor's background threads.
  void PostDeferredWork();
  // Returns true if the factors include the step's gradient and their last answer is that of the step. Only a method
  // that learns from gradients can be in this state.
  bool HasTakenIn(const StepData& data) const;
  // Returns FailedPrecondition if the layer has no factors yet.
  absl::Status CheckReady() const;
  AnswerCause CauseOfFailure() const;  // cause for an answer if the method has failed
  // Preconditions d into u, both on the device; repeats the last answer if `taken_in`. If `u_squared` is not null, it
  // gets |u|^2, and then u is complete.
  absl::Status Compute(ConstMatrixView d, bool taken_in, MatrixView u, GradientResult& answer, double* u_squared);
  // Preconditions `gradient` in place. An error leaves `gradient` as it was. The answer is SKIP if `gradient` is lost.
  absl::StatusOr<GradientResult> RunMethod(absl::Span<float> gradient, bool taken_in);
  GradientResult PreconditionOnDevice(StepData& data);
  // Returns the host memory of the average in f32.
  absl::Span<float> Values(StepData& data) const;
  // Makes the average from `data.sum`, `data.parts` or `data.result_buffer` in `values`.
  absl::Status MakeAverage(StepData& data, absl::Span<float> values) const;
  // Decodes `data.result_buffer` into `values`, which may be its own memory.
  void Decode(const StepData& data, absl::Span<float> values) const;
  // Allocates `data.decoded` if the session's gradient type needs it.
  absl::Status MakeRoom(StepData& data) const;
  int64_t WireBytes() const;  // of a gradient in the session's gradient type
  absl::StatusOr<GradientResult> RunMethodOnDevice(ConstMatrixView gradient, bool taken_in, MatrixView u);
  GradientResult Encode(StepData& data, GradientResult answer, absl::Span<float> values);

  SessionContext& session_;
  Backend& backend_;
  const LayerSpec& spec_;
  const bool single_;  // one rank sends the gradient, so there is nothing to add up
  const uint32_t layer_;
  const Method& method_;
  std::unique_ptr<LayerState> state_;
  std::shared_ptr<Backend::ExpectedTask> expected_;  // null unless a task of the layer is expected
  // Result of state_->Save(), shared by all requests of one factor version; null if it has not been saved.
  std::shared_ptr<const Payload> saved_;
};

}  // namespace precondor

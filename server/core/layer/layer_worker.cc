// SPDX-License-Identifier: Apache-2.0
// The layer's factors and their updates. layer_worker_answers.cc has the answers.
#include "server/core/layer/layer_worker.h"

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/layer/statistics_merge.h"
#include "server/core/resources/reservation.h"

namespace precondor {

LayerWorker::LayerWorker(SessionContext& session, uint32_t layer, std::unique_ptr<LayerState> state)
    : session_(session),
      device_(session.DeviceOf(layer)),
      spec_(session.spec.layers[layer]),
      single_(GradientContributors(session.spec) == 1),
      layer_(layer),
      method_(session.methods.of(layer)),
      state_(std::move(state)) {}

absl::Status LayerWorker::MakeFresh() {
  PRECONDOR_ASSIGN_OR_RETURN(state_, session_.MakeState(layer_));
  return absl::OkStatus();
}

void LayerWorker::SetState(std::unique_ptr<LayerState> state) {
  state_ = std::move(state);
  saved_ = nullptr;
  if (state_ != nullptr) PostDeferredWork();
}

absl::Status LayerWorker::Load(absl::string_view bytes) {
  absl::Status status = state_->Load(bytes);
  saved_ = nullptr;
  if (status.ok()) PostDeferredWork();
  return status;
}

void LayerWorker::PostDeferredWork() {
  std::function<void()> work = state_->TakeDeferredWork();
  if (!work) return;
  device_.executor.PostBackground(std::move(work));
}

LayerWorker::StateView LayerWorker::view() const {
  if (state_ == nullptr) return {};
  return {true, state_->version(), state_->bytes(), state_->summary()};
}

LayerWorker::UpdateOutcome LayerWorker::Update(std::vector<StagedContribution> contributions) {
  UpdateOutcome outcome;
  if (!contributions.empty() && state_ != nullptr) {
    outcome.attempted = true;
    const LayerState::Summary before = state_->summary();
    saved_ = nullptr;
    outcome.status = ApplyStatistics(contributions, outcome);
    const LayerState::Summary after = state_->summary();
    outcome.decomposition_failed = after.failed_decompositions > before.failed_decompositions;
    outcome.reset = after.resets > before.resets;
    PostDeferredWork();
  }
  outcome.state = view();
  return outcome;
}

absl::Status LayerWorker::ApplyStatistics(std::vector<StagedContribution>& contributions, UpdateOutcome& outcome) {
  PRECONDOR_ASSIGN_OR_RETURN(ScratchPool::Lease scratch,
                             device_.statistics_scratch.Acquire(StatisticsScratchElements(session_.spec, layer_)));
  PRECONDOR_ASSIGN_OR_RETURN(const LayerStatistics merged,
                             MergeStatistics(session_.spec, layer_, contributions, device_.backend, scratch));
  contributions.clear();
  PublishedUpdate update;
  if (session_.spec.exchange == ExchangeMode::kReplay) {
    PRECONDOR_ASSIGN_OR_RETURN(update, Seal(merged));
  }
  const absl::Time start = session_.shard->clock.Now();
  Backend::Task task(device_.backend);
  expected_ = nullptr;
  absl::Status status = state_->Update(merged);
  status.Update(task.Finish());
  outcome.took = session_.shard->clock.Now() - start;
  if (status.ok() && WorkersPrecondition(session_.spec)) outcome.update = std::move(update);
  return status;
}

absl::StatusOr<PublishedUpdate> LayerWorker::Seal(const LayerStatistics& merged) const {
  PublishedUpdate update;
  Payload bytes(static_cast<size_t>(merged.a.size() + merged.g.size()) * ByteSize(DType::kF32));
  // Heap blocks are aligned for f32, and the wire's byte order is the host's.
  float* out = reinterpret_cast<float*>(bytes.data());
  for (const ConstMatrixView& side : {merged.a, merged.g}) {
    PRECONDOR_RETURN_IF_ERROR(device_.backend.Download(side, MatrixView(out, side.rows, side.cols)));
    update.tensors.push_back({.dtype = DType::kF32, .dims = {side.rows, side.cols}, .scale = 1.0f});
    out += side.size();
  }
  update.bytes = std::make_shared<const Payload>(std::move(bytes));
  return update;
}

absl::StatusOr<GradientResult> LayerWorker::Fetch() {
  GradientResult result;
  result.factor_version = view().version;
  if (state_ == nullptr) {
    result.reason = NoFactors();
    result.cause = AnswerCause::kNoFactors;
    return result;
  }
  result.decision = Decision::kPreconditioned;
  result.bytes = saved_;
  if (result.bytes != nullptr) return result;
  const absl::StatusOr<std::string> saved = state_->Save();
  if (!saved.ok()) return absl::UnavailableError(saved.status().message());
  // Source and target have the same element type: the library would copy from chars byte by byte.
  const auto* bytes = reinterpret_cast<const uint8_t*>(saved->data());
  result.bytes = std::make_shared<const Payload>(bytes, bytes + saved->size());
  // Every rank fetches factors that workers keep. For a checkpoint they are read once, and gradients can change them.
  if (WorkersPrecondition(session_.spec)) saved_ = result.bytes;
  return result;
}

std::string LayerWorker::NoFactors() const {
  return absl::StrCat("layer \"", spec_.name, "\" has no factors since the fallback to first order");
}

}  // namespace precondor

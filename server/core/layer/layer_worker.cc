// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_worker.h"

#include <cmath>
#include <exception>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"
#include "server/core/layer/gradient_parts.h"
#include "server/core/layer/reduction.h"
#include "server/core/layer/statistics_merge.h"
#include "server/core/resources/memory_pools.h"
#include "server/core/resources/reservation.h"

namespace precondor {
namespace {

constexpr absl::string_view kNotFinite = "the average of the gradients is not finite in f32";

// Heap blocks are aligned for f32, and the wire's byte order is the host's.
absl::Span<float> FloatsIn(Payload& bytes) {
  return absl::MakeSpan(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
}

absl::Status Resize(Payload& payload, int64_t bytes) {
  try {
    payload.resize(static_cast<size_t>(bytes));
  } catch (const std::exception&) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for an answer of ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

LayerWorker::LayerWorker(SessionContext& session, uint32_t layer, std::unique_ptr<LayerState> state)
    : session_(session),
      backend_(session.shard->backend),
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
  PostDeferredWork();
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
  session_.shard->executor.PostBackground(std::move(work));
}

LayerWorker::StateView LayerWorker::view() const { return {state_->version(), state_->bytes(), state_->summary()}; }

LayerWorker::UpdateOutcome LayerWorker::Update(std::vector<StagedContribution> contributions) {
  UpdateOutcome outcome;
  if (!contributions.empty()) {
    outcome.attempted = true;
    const LayerState::Summary before = state_->summary();
    saved_ = nullptr;
    outcome.status = ApplyStatistics(contributions, outcome);
    const LayerState::Summary after = state_->summary();
    outcome.decomposition_failed = after.failed_decompositions > before.failed_decompositions;
    outcome.reset = after.resets > before.resets;
    PostDeferredWork();
  }
  return outcome;
}

absl::Status LayerWorker::ApplyStatistics(std::vector<StagedContribution>& contributions, UpdateOutcome& outcome) {
  PRECONDOR_ASSIGN_OR_RETURN(ScratchPool::Lease scratch,
                             session_.statistics_scratch.Acquire(StatisticsScratchElements(session_.spec, layer_)));
  PRECONDOR_ASSIGN_OR_RETURN(const LayerStatistics merged,
                             MergeStatistics(session_.spec, layer_, contributions, backend_, scratch));
  contributions.clear();
  PublishedUpdate update;
  if (session_.spec.exchange == ExchangeMode::kReplay) {
    PRECONDOR_ASSIGN_OR_RETURN(update, Seal(merged));
  }
  const absl::Time start = session_.shard->clock.Now();
  Backend::Task task(backend_);
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
    PRECONDOR_RETURN_IF_ERROR(backend_.Download(side, MatrixView(out, side.rows, side.cols)));
    update.tensors.push_back({.dtype = DType::kF32, .dims = {side.rows, side.cols}, .scale = 1.0f});
    out += side.size();
  }
  update.bytes = std::make_shared<const Payload>(std::move(bytes));
  return update;
}

absl::StatusOr<GradientResult> LayerWorker::Fetch() {
  GradientResult result;
  result.factor_version = view().version;
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

// --- answers --------------------------------------------------------------------------------------------------------

void LayerWorker::Accumulate(StepData& data, StagedContribution contribution) {
  if (!data.lost.ok()) return;
  if (session_.spec.exchange == ExchangeMode::kSharded) {
    data.parts.push_back(std::move(contribution));
    return;
  }
  if (data.result_buffer.empty()) data.result_scale = contribution.scales[0];
  if (!single_) {
    if (!data.sum.has_value()) {
      absl::StatusOr<WeightedSum> sum = WeightedSum::Make(spec_.d_out * spec_.d_in);
      if (!sum.ok()) {
        data.lost = sum.status();
        return;
      }
      data.sum = *std::move(sum);
    }
    data.sum->Add(contribution.samples, session_.spec.gradient_dtype, contribution.bytes.data(),
                  contribution.scales[0]);
  }
  if (data.result_buffer.empty()) {
    data.result_buffer = std::move(contribution.bytes);
  } else {
    session_.payloads->Give(std::move(contribution.bytes));
  }
  data.on_device = std::move(contribution.on_device);  // a gradient on the device is the only one
}

absl::Span<float> LayerWorker::Values(StepData& data) const {
  // f32 values live in the buffer that becomes the result: heap blocks are aligned for them, and the wire's byte order
  // is the host's.
  return session_.spec.gradient_dtype == DType::kF32 ? FloatsIn(data.result_buffer) : data.decoded.span();
}

absl::Status LayerWorker::MakeAverage(StepData& data, absl::Span<float> values) const {
  const DType dtype = session_.spec.gradient_dtype;
  if (session_.spec.exchange == ExchangeMode::kSharded) {
    PRECONDOR_RETURN_IF_ERROR(JoinParts(spec_, dtype, data.parts, values));
  } else if (data.sum.has_value()) {
    data.sum->Finish(values);
    data.sum.reset();
    // CheckGradient has checked a single gradient on arrival.
    if (!AllFinite(values)) return absl::OutOfRangeError(kNotFinite);
  } else {
    Decode(data, values);
    if (dtype == DType::kF32) data.result_scale = 1;
    return absl::OkStatus();
  }
  data.result_scale = 1;
  if (dtype == DType::kF32 || !method_.learns_from_gradients()) return absl::OkStatus();
  data.result_scale = dtype == DType::kF16 ? F16Scale(values) : 1.0f;
  EncodeElements(dtype, values, data.result_scale, data.result_buffer.data());
  Decode(data, values);
  return absl::OkStatus();
}

void LayerWorker::Decode(const StepData& data, absl::Span<float> values) const {
  const DType dtype = session_.spec.gradient_dtype;
  if (dtype == DType::kF32 && data.result_scale == 1.0f) return;
  DecodeElements(dtype, data.result_buffer.data(), data.result_scale, values);
}

absl::Status LayerWorker::MakeRoom(StepData& data) const {
  if (session_.spec.gradient_dtype == DType::kF32) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(data.decoded, HostBuffer<float>::Make(spec_.d_out * spec_.d_in));
  return absl::OkStatus();
}

void LayerWorker::Average(StepData& data, std::vector<StagedContribution> contributions) {
  for (StagedContribution& contribution : contributions) Accumulate(data, std::move(contribution));
  if (data.on_device != nullptr) return;
  if (session_.spec.exchange == ExchangeMode::kSharded) {
    data.result_buffer = session_.payloads->Take(static_cast<uint64_t>(WireBytes()));
    data.lost.Update(Resize(data.result_buffer, WireBytes()));
  }
  if (data.lost.ok()) data.lost = MakeRoom(data);
  if (data.lost.ok()) data.lost = MakeAverage(data, Values(data));
}

bool LayerWorker::LearnsFrom(const StepData& data) const {
  const bool identity = data.plan.has_value() && data.plan->decision == Decision::kIdentity;
  return method_.learns_from_gradients() && data.lost.ok() && data.mode == Mode::kSecondOrder && !identity &&
         !HasTakenIn(data);
}

absl::StatusOr<StagedContribution> LayerWorker::TakeAverage(StepData& data) {
  StagedContribution average{.samples = 1, .scales = {data.result_scale, 1}};
  if (data.on_device == nullptr) {
    average.bytes = std::move(data.result_buffer);
    return average;
  }
  const ConstMatrixView gradient = data.on_device->values;
  PRECONDOR_RETURN_IF_ERROR(Resize(average.bytes, WireBytes()));
  PRECONDOR_RETURN_IF_ERROR(
      backend_.Download(gradient, MatrixView(FloatsIn(average.bytes).data(), gradient.rows, gradient.cols)));
  return average;
}

void LayerWorker::PutBack(StagedContribution average, StepData& data) {
  if (data.on_device == nullptr) data.result_buffer = std::move(average.bytes);
}

GradientResult LayerWorker::Relearn(StagedContribution average) {
  StepData data(StepPayloads(0, 0), StepPayloads(0, 0));
  data.result_scale = average.scales[0];
  data.result_buffer = std::move(average.bytes);
  data.lost = static_cast<int64_t>(data.result_buffer.size()) == WireBytes()
                  ? MakeRoom(data)
                  : absl::DataLossError("the journal's gradient has another size than the layer");
  if (data.lost.ok()) Decode(data, Values(data));
  return Precondition(data);
}

GradientResult LayerWorker::Precondition(StepData& data) {
  if (!data.lost.ok()) {
    return Skip(data, absl::IsOutOfRange(data.lost) ? AnswerCause::kNotFinite : AnswerCause::kFailed,
                std::string(data.lost.message()));
  }
  if (data.on_device != nullptr) return PreconditionOnDevice(data);
  const absl::Span<float> gradient = Values(data);
  const bool planned = data.plan.has_value() && data.plan->decision == Decision::kIdentity;
  if (planned || data.mode == Mode::kFirstOrder) {
    GradientResult average;
    average.decision = Decision::kIdentity;
    average.reason = planned ? data.plan->reason : "first order";
    average.cause = planned ? AnswerCause::kRecovered : AnswerCause::kFirstOrder;
    return Encode(data, std::move(average), gradient);
  }
  absl::StatusOr<GradientResult> answer = RunMethod(gradient, HasTakenIn(data));
  if (answer.ok() && answer->decision == Decision::kSkip) {
    return Skip(data, AnswerCause::kFailed, std::move(answer->reason));
  }
  if (answer.ok()) return Encode(data, *std::move(answer), gradient);
  if (method_.traits().whole_updates) return Skip(data, CauseOfFailure(), std::string(answer.status().message()));
  // RunMethod leaves `gradient` as it was when it fails.
  GradientResult identity;
  identity.decision = Decision::kIdentity;
  identity.reason = std::string(answer.status().message());
  identity.cause = CauseOfFailure();
  return Encode(data, std::move(identity), gradient);
}

bool LayerWorker::HasTakenIn(const StepData& data) const {
  return method_.learns_from_gradients() && data.plan.has_value() && data.plan->decision == Decision::kPreconditioned &&
         data.plan->factor_version == state_->version();
}

int64_t LayerWorker::WireBytes() const {
  return spec_.d_out * spec_.d_in * static_cast<int64_t>(ByteSize(session_.spec.gradient_dtype));
}

bool LayerWorker::LacksGradientsOf(const Plan& plan) const {
  return method_.learns_from_gradients() && plan.decision == Decision::kPreconditioned &&
         plan.factor_version > view().version + 1;
}

absl::Status LayerWorker::CheckReady() const {
  if (state_->ready()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("layer \"", spec_.name, "\" has no factors yet"));
}

AnswerCause LayerWorker::CauseOfFailure() const {
  return CheckReady().ok() ? AnswerCause::kFailed : AnswerCause::kNoFactors;
}

absl::Status LayerWorker::Compute(ConstMatrixView d, bool taken_in, MatrixView u, GradientResult& answer,
                                  double* u_squared) {
  const absl::Time start = session_.shard->clock.Now();
  Backend::Task task(backend_);
  expected_ = nullptr;
  PRECONDOR_RETURN_IF_ERROR(taken_in ? state_->Repeat(u) : state_->Precondition(d, u));
  if (method_.needs_global_scale()) {
    PRECONDOR_ASSIGN_OR_RETURN(answer.inner_product, backend_.Dot(d, u));
  }
  if (u_squared != nullptr) {
    PRECONDOR_ASSIGN_OR_RETURN(*u_squared, backend_.Dot(u, u));
  }
  PRECONDOR_RETURN_IF_ERROR(task.Finish());
  answer.took.precondition = session_.shard->clock.Now() - start;
  return absl::OkStatus();
}

absl::StatusOr<GradientResult> LayerWorker::RunMethod(absl::Span<float> gradient, bool taken_in) {
  PRECONDOR_RETURN_IF_ERROR(CheckReady());
  PRECONDOR_ASSIGN_OR_RETURN(ScratchPool::Lease scratch,
                             session_.gradient_scratch.Acquire(GradientScratchElements(session_.spec, layer_)));
  const MatrixView d = scratch.view(0, spec_.d_out, spec_.d_in);
  const MatrixView u = scratch.view(d.size(), spec_.d_out, spec_.d_in);
  const MatrixView host(gradient.data(), spec_.d_out, spec_.d_in);
  PRECONDOR_RETURN_IF_ERROR(scratch.Upload(host, d));
  GradientResult answer;
  PRECONDOR_RETURN_IF_ERROR(Compute(d, taken_in, u, answer, /*u_squared=*/nullptr));
  absl::Status status = backend_.Download(u, host);
  if (status.ok()) scratch.NoteIdle();
  if (status.ok() && !AllFinite(gradient)) status = absl::InternalError("the preconditioned gradient is not finite");
  if (!status.ok()) {
    const absl::Status restored = backend_.Download(d, host);
    if (restored.ok()) return status;
    // The average is lost, and `gradient` may hold anything: no replica may use it.
    answer.decision = Decision::kSkip;
    answer.reason = absl::StrCat("the gradient did not come back from the device: ", restored.message());
    return answer;
  }
  answer.decision = Decision::kPreconditioned;
  return answer;
}

GradientResult LayerWorker::PreconditionOnDevice(StepData& data) {
  const std::shared_ptr<const DevicePayload> payload = std::move(data.on_device);
  const ConstMatrixView gradient = payload->values;
  // The answer needs memory of its own: it is kept for repetitions, while the gradient's memory is the worker's again.
  absl::StatusOr<DeviceMatrix> kept = backend_.AllocateScratch(gradient.rows, gradient.cols);
  if (!kept.ok()) return Skip(data, AnswerCause::kFailed, std::string(kept.status().message()));
  GradientResult answer;
  const bool planned = data.plan.has_value() && data.plan->decision == Decision::kIdentity;
  absl::Status status = absl::FailedPreconditionError(planned ? data.plan->reason : "first order");
  AnswerCause cause = planned ? AnswerCause::kRecovered : AnswerCause::kFirstOrder;
  if (!planned && data.mode != Mode::kFirstOrder) {
    absl::StatusOr<GradientResult> made = RunMethodOnDevice(gradient, HasTakenIn(data), kept->view());
    status = made.status();
    if (made.ok()) answer = *std::move(made);
    cause = CauseOfFailure();
    if (!status.ok() && method_.traits().whole_updates) return Skip(data, cause, std::string(status.message()));
  }
  if (!status.ok()) {
    answer.cause = cause;
    answer.decision = Decision::kIdentity;
    answer.reason = std::string(status.message());
    const absl::Status copied = backend_.Copy(gradient, kept->view());
    // Dot returns after the copy has ended.
    const absl::StatusOr<double> squared = copied.ok() ? backend_.Dot(kept->view(), kept->view()) : copied;
    if (!squared.ok()) {
      return Skip(data, AnswerCause::kFailed,
                  absl::StrCat("the gradient cannot be had from the device: ", squared.status().message()));
    }
    if (!std::isfinite(*squared)) {
      return Skip(data, AnswerCause::kNotFinite, "the gradient has become other than finite since it came");
    }
  }
  answer.tensors = {{.dtype = DType::kF32, .dims = {gradient.rows, gradient.cols}, .scale = 1.0f}};
  answer.on_device = std::make_shared<DeviceAnswer>(backend_, *std::move(kept));
  answer.factor_version = view().version;
  return answer;
}

absl::StatusOr<GradientResult> LayerWorker::RunMethodOnDevice(ConstMatrixView gradient, bool taken_in, MatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(CheckReady());
  ConstMatrixView d = gradient;
  std::optional<ScratchPool::Lease> scratch;
  if (method_.learns_from_gradients()) {
    // The gradient becomes part of the factors. The method checks it, in memory that no worker can write.
    PRECONDOR_ASSIGN_OR_RETURN(ScratchPool::Lease lease,
                               session_.gradient_scratch.Acquire(GradientScratchElements(session_.spec, layer_)));
    scratch.emplace(std::move(lease));
    const MatrixView own = scratch->view(0, gradient.rows, gradient.cols);
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(gradient, own));
    d = own;
  }
  GradientResult answer;
  double squared = 0;
  PRECONDOR_RETURN_IF_ERROR(Compute(d, taken_in, u, answer, &squared));
  if (!std::isfinite(squared)) return absl::InternalError("the preconditioned gradient is not finite");
  answer.decision = Decision::kPreconditioned;
  return answer;
}

GradientResult LayerWorker::Encode(StepData& data, GradientResult answer, absl::Span<float> values) {
  const DType dtype = session_.spec.gradient_dtype;
  TensorDesc tensor{.dtype = dtype, .dims = {spec_.d_out, spec_.d_in}, .scale = 1.0f};
  if (dtype != DType::kF32) {
    if (dtype == DType::kF16) tensor.scale = F16Scale(values);
    EncodeElements(dtype, values, tensor.scale, data.result_buffer.data());
    data.decoded = {};
  }
  answer.tensors = {std::move(tensor)};
  answer.bytes = session_.payloads->Share(std::move(data.result_buffer));
  answer.factor_version = view().version;
  return answer;
}

GradientResult LayerWorker::Skip(StepData& data, AnswerCause cause, std::string reason) {
  data.sum.reset();
  data.parts.clear();
  data.result_buffer = Payload();
  data.decoded = {};
  data.on_device = nullptr;
  GradientResult answer;
  answer.decision = Decision::kSkip;
  answer.reason = std::move(reason);
  answer.cause = cause;
  answer.factor_version = view().version;
  return answer;
}

GradientResult LayerWorker::PublishUpdate(const StepData& data) {
  GradientResult answer;
  const bool known = data.update.has_value() && data.update->bytes != nullptr;
  // The factors were restored with the update, whose vectors are lost.
  const bool made = data.update.has_value() || data.restored_update ||
                    (data.plan.has_value() && data.plan->decision == Decision::kPreconditioned);
  if (made && !known) {
    absl::StatusOr<GradientResult> factors = Fetch();
    if (factors.ok()) {
      answer = *std::move(factors);
    } else {
      answer.reason = std::string(factors.status().message());
      answer.cause = AnswerCause::kFailed;
    }
  } else if (known) {
    answer.decision = Decision::kPreconditioned;
    answer.tensors = data.update->tensors;
    answer.bytes = data.update->bytes;
  } else {
    answer.reason = "the step's statistics have changed nothing";
    answer.cause = AnswerCause::kUnchanged;
  }
  answer.factor_version = view().version;
  return answer;
}

}  // namespace precondor

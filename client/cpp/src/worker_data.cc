// SPDX-License-Identifier: Apache-2.0
// Sends a worker's statistics, gradients and requests for factors. A gradient in device memory travels in a slot of a
// region shared with the shard, or through the host.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/src/device_gradients.h"
#include "client/cpp/src/local_factors.h"
#include "client/cpp/src/result_state.h"
#include "client/cpp/src/worker.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"
#include "kernels/methods/registry.h"
#include "precondor/statistics.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {
namespace {

// Returns INVALID_ARGUMENT (SHAPE_MISMATCH) unless `have` is [rows, cols] and has memory, if it has elements.
absl::Status CheckShape(const std::string& what, const char* name, ConstMatrixView have, int64_t rows, int64_t cols) {
  const bool there = have.data != nullptr || rows * cols == 0;
  if (there && have.rows == rows && have.cols == cols && (rows == 1 || have.stride >= cols)) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
                        absl::StrCat(what, ": ", name, ": expected [", rows, ", ", cols, "], got [", have.rows, ", ",
                                     have.cols, "]", have.data == nullptr ? " without memory" : ""));
}

// Returns INVALID_ARGUMENT (SHAPE_MISMATCH) unless the parts are within the layer's gradient, and not larger together.
absl::Status CheckParts(const std::string& what, const LayerSpec& layer, absl::Span<const GradientPart> parts) {
  const bool fits = parts.size() <= kMaxGradientParts && ReceivedElements(parts) <= layer.d_out * layer.d_in &&
                    absl::c_all_of(parts, [&layer](const GradientPart& part) { return IsWithin(part, layer); });
  if (fits) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
      absl::StrCat(what, ": parts: expected at most ", kMaxGradientParts, " of [", layer.d_out, ", ", layer.d_in,
                   "] that do not overlap, got ", parts.size(), " with ", ReceivedElements(parts), " elements"));
}

// Returns INVALID_ARGUMENT (MALFORMED) unless `samples` is in 1 ... kMaxSamples.
absl::Status CheckSamples(const std::string& what, uint64_t samples) {
  if (samples > 0 && samples <= kMaxSamples) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                        absl::StrCat(what, ": samples: expected 1 ... ", kMaxSamples, ", got ", samples));
}

// Encodes matrices one after the other, and appends their headers to `tensors`.
std::shared_ptr<const std::vector<uint8_t>> EncodeTensors(DType dtype, std::initializer_list<ConstMatrixView> matrices,
                                                          std::vector<v1::TensorHeader>& tensors) {
  size_t bytes = 0;
  for (const ConstMatrixView& m : matrices) bytes += static_cast<size_t>(m.size()) * ByteSize(dtype);
  auto payload = std::make_shared<std::vector<uint8_t>>(bytes);
  size_t offset = 0;
  for (const ConstMatrixView& m : matrices) {
    const float scale = wire::TensorScale(dtype, m);
    const size_t size = static_cast<size_t>(m.size()) * ByteSize(dtype);
    const absl::Status status = wire::EncodeMatrix(dtype, scale, m, absl::MakeSpan(*payload).subspan(offset, size));
    PRECONDOR_CHECK(status.ok());  // the span has the matrix' size
    offset += size;
    tensors.push_back(wire::EncodeTensorHeader({dtype, {m.rows, m.cols}, scale}));
  }
  return payload;
}

// Returns a future that is ready with `status`.
PreconditionFuture FailedFuture(const absl::Status& status) {
  auto state = std::make_shared<PreconditionFuture::State>("", MatrixView(), false, false);
  state->Fail(status);
  return PreconditionFuture(std::move(state));
}

bool Overlap(ConstMatrixView x, ConstMatrixView y) {
  if (x.size() == 0 || y.size() == 0) return false;
  const float* x_end = x.row(x.rows - 1) + x.cols;
  const float* y_end = y.row(y.rows - 1) + y.cols;
  return std::less<>()(x.data, y_end) && std::less<>()(y.data, x_end);
}

// Answers a first-order step whose gradient is the job's average: the gradient itself, or SKIP if it is not finite.
PreconditionFuture AnsweredFuture(const std::string& what, ConstMatrixView gradient, MatrixView out) {
  auto state = std::make_shared<PreconditionFuture::State>(what, out, false, false);
  bool finite = true;
  for (int64_t row = 0; row < gradient.rows; ++row) {
    for (int64_t col = 0; col < gradient.cols; ++col) finite = finite && std::isfinite(gradient.row(row)[col]);
  }
  if (!finite) {
    state->Complete({Decision::kSkip, 0, 0, "the gradient is not finite"});
    return PreconditionFuture(std::move(state));
  }
  for (int64_t row = 0; row < gradient.rows; ++row) {
    std::memmove(out.row(row), gradient.row(row), static_cast<size_t>(gradient.cols) * sizeof(float));
  }
  state->Complete({Decision::kIdentity, 0, 0, "first order"});
  return PreconditionFuture(std::move(state));
}

MatrixView ViewOf(const DeviceTensor& tensor) { return {tensor.data, tensor.rows, tensor.cols, tensor.stride}; }

}  // namespace

absl::Status WorkerImpl::SendStatistics(uint64_t step, int64_t layer, ConstMatrixView a, ConstMatrixView g,
                                        uint64_t samples) {
  PRECONDOR_ASSIGN_OR_RETURN(const Mode mode, CheckStep(step, layer));
  PRECONDOR_RETURN_IF_ERROR(CheckStatistics(step, layer));
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  const std::string what = Describe(step, layer);
  const auto check = [&](const char* name, ConstMatrixView side, int64_t d) {
    // A packed triangle may stand for any number of rows. No side has 0 rows.
    const int64_t rows = side.cols == d ? std::max<int64_t>(side.rows, 1) : MaxRows(d) + 1;
    const StatisticsShape expected = ShapeOfStatistics(spec_, layer, d, rows);
    return CheckShape(what, name, side, expected.rows, expected.cols);
  };
  PRECONDOR_RETURN_IF_ERROR(check("a", a, shape.d_in));
  PRECONDOR_RETURN_IF_ERROR(check("g", g, shape.d_out));
  PRECONDOR_RETURN_IF_ERROR(CheckSamples(what, samples));
  auto contribution = std::make_shared<Contribution>();
  contribution->id = {v1::FRAME_KIND_STATISTICS, step, static_cast<uint32_t>(layer)};
  contribution->mode = mode;
  contribution->samples = samples;
  const auto payload = EncodeTensors(spec_.statistics_dtype, {a, g}, contribution->tensors);
  contribution->payload = *payload;
  contribution->payload_owner = payload;
  return SubmitStatistics(std::move(contribution), layer);
}

absl::Status WorkerImpl::AbstainStatistics(uint64_t step, int64_t layer) {
  PRECONDOR_ASSIGN_OR_RETURN(const Mode mode, CheckStep(step, layer));
  PRECONDOR_RETURN_IF_ERROR(CheckStatistics(step, layer));
  auto contribution = std::make_shared<Contribution>();
  contribution->id = {v1::FRAME_KIND_STATISTICS, step, static_cast<uint32_t>(layer)};
  contribution->mode = mode;
  contribution->abstain = true;
  return SubmitStatistics(std::move(contribution), layer);
}

absl::Status WorkerImpl::SubmitStatistics(std::shared_ptr<Contribution> statistics, int64_t layer) {
  const uint64_t step = statistics->id.step;
  statistics->deadline = MonotonicNow() + options_.result_timeout;
  const bool pulls = factors_ != nullptr && TakesStatistics(spec_, layer);
  if (!pulls) return routes_.Submit(static_cast<size_t>(layer), std::move(statistics));
  factors_->Need(layer);
  std::shared_ptr<AnswerSink> update = factors_->ExpectUpdate(layer, step);
  if (update == nullptr) {
    return absl::AlreadyExistsError(absl::StrCat(Describe(step, layer), ": sent already and not yet answered"));
  }
  absl::Status sent = routes_.Submit(static_cast<size_t>(layer), std::move(statistics));
  if (sent.ok()) sent = SendRequest(v1::FRAME_KIND_PULL, step, layer, std::move(update));
  if (!sent.ok()) factors_->CancelUpdate(layer, step);
  return sent;
}

absl::Status WorkerImpl::SendRequest(v1::FrameKind kind, uint64_t step, int64_t layer,
                                     std::shared_ptr<AnswerSink> sink) {
  auto request = std::make_shared<Contribution>();
  request->id = {kind, step, static_cast<uint32_t>(layer)};
  request->result = std::move(sink);
  request->deadline = MonotonicNow() + options_.result_timeout;
  return routes_.Submit(static_cast<size_t>(layer), std::move(request));
}

void WorkerImpl::FetchFactors(int64_t layer, const std::shared_ptr<AnswerSink>& sink) {
  const absl::Status sent = SendRequest(v1::FRAME_KIND_FETCH, steps_->next_step(), layer, sink);
  if (!sent.ok()) sink->Fail(sent);
}

absl::StatusOr<std::string> WorkerImpl::ReadFactors(int64_t layer) {
  PRECONDOR_RETURN_IF_ERROR(CheckLayer(layer));
  PRECONDOR_ASSIGN_OR_RETURN(const MethodSet methods, MethodSet::Make(spec_, MakeMethod));
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  FactorUpdateSink::Limits limits;
  limits.most_bytes = methods.of(layer).SavedBytes(shape);
  auto fetched = std::make_shared<std::promise<absl::StatusOr<FactorUpdate>>>();
  std::future<absl::StatusOr<FactorUpdate>> answer = fetched->get_future();
  const std::string what = absl::StrCat("session ", session_, " layer ", shape.name, ": factors");
  held_->Send();
  FetchFactors(layer, std::make_shared<FactorUpdateSink>(what, limits, [fetched](absl::StatusOr<FactorUpdate> update) {
                 fetched->set_value(std::move(update));
               }));
  PRECONDOR_ASSIGN_OR_RETURN(FactorUpdate update, answer.get());  // at result_timeout the link fails the request
  return std::move(update.bytes);
}

// Returns an owner for the caller's memory. When the last reference ends, neither the outbox nor gRPC reads the memory.
std::shared_ptr<const void> WorkerImpl::Borrow(const std::shared_ptr<PreconditionFuture::State>& state) {
  borrowed_->Add();
  return std::shared_ptr<const void>(state.get(), [state, borrowed = borrowed_](const void*) {
    state->OnPayloadReleased();
    borrowed->Release();
  });
}

PreconditionFuture WorkerImpl::Precondition(uint64_t step, int64_t layer, const GradientBuffers& buffers,
                                            uint64_t samples, bool more) {
  if (const auto* matrix = std::get_if<GradientBuffers::Matrix>(&buffers.form())) {
    return PreconditionMatrix(step, layer, *matrix, samples, more);
  }
  if (const auto* parts = std::get_if<GradientBuffers::Parts>(&buffers.form())) {
    return PreconditionParts(step, layer, *parts);
  }
  return PreconditionOnDevice(step, layer, std::get<GradientBuffers::DeviceMatrix>(buffers.form()), samples);
}

PreconditionFuture WorkerImpl::PreconditionMatrix(uint64_t step, int64_t layer, const GradientBuffers::Matrix& matrix,
                                                  uint64_t samples, bool more) {
  const auto& [gradient, out] = matrix;
  const absl::StatusOr<Mode> mode = CheckStep(step, layer);
  if (!mode.ok()) return FailedFuture(mode.status());
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  const std::string what = Describe(step, layer);
  absl::Status status = CheckWholeGradient(layer);
  status.Update(CheckShape(what, "gradient", gradient, shape.d_out, shape.d_in));
  status.Update(CheckShape(what, "out", out, shape.d_out, shape.d_in));
  status.Update(CheckSamples(what, samples));
  if (!status.ok()) return FailedFuture(status);
  if (NeedsNoShard(*mode)) return AnsweredFuture(what, gradient, out);
  if (factors_ != nullptr) {
    auto state = std::make_shared<PreconditionFuture::State>(what, out, false, false);
    ExplainLate(*state, step, layer);
    factors_->Precondition(step, layer, gradient, out, state);
    return PreconditionFuture(std::move(state));
  }
  auto contribution = std::make_shared<Contribution>();
  contribution->id = {v1::FRAME_KIND_GRADIENT, step, static_cast<uint32_t>(layer)};
  contribution->mode = *mode;
  contribution->samples = samples;
  contribution->may_wait = more;
  return SubmitGradient(std::move(contribution), what, gradient, out);
}

PreconditionFuture WorkerImpl::PreconditionParts(uint64_t step, int64_t layer, const GradientBuffers::Parts& buffers) {
  const auto& [parts, gradient, out] = buffers;
  const absl::StatusOr<Mode> mode = CheckStep(step, layer);
  if (!mode.ok()) return FailedFuture(mode.status());
  const std::string what = Describe(step, layer);
  absl::Status status;
  if (spec_.exchange != ExchangeMode::kSharded) {
    status = absl::FailedPreconditionError(
        absl::StrCat(what, ": parts: expected exchange SHARDED, got ", ExchangeModeName(spec_.exchange)));
  }
  status.Update(CheckParts(what, spec_.layers[static_cast<size_t>(layer)], parts));
  status.Update(CheckShape(what, "gradient", gradient, 1, SentElements(parts)));
  status.Update(CheckShape(what, "out", out, 1, ReceivedElements(parts)));
  if (!status.ok()) return FailedFuture(status);
  if (NeedsNoShard(*mode)) {
    auto state = std::make_shared<PreconditionFuture::State>(what, out, false, false);
    state->Complete({Decision::kIdentity, 0, 0, "first order"});
    return PreconditionFuture(std::move(state));
  }
  auto contribution = std::make_shared<Contribution>();
  contribution->id = {v1::FRAME_KIND_GRADIENT, step, static_cast<uint32_t>(layer)};
  contribution->mode = *mode;
  contribution->samples = 1;  // parts are not weighed
  contribution->parts.assign(parts.begin(), parts.end());
  return SubmitGradient(std::move(contribution), what, gradient, out);
}

PreconditionFuture WorkerImpl::SubmitGradient(std::shared_ptr<Contribution> contribution, const std::string& what,
                                              ConstMatrixView gradient, MatrixView out) {
  const int64_t layer = contribution->id.layer;
  const absl::Span<const uint8_t> alias = wire::AliasPayload(spec_.gradient_dtype, gradient);
  const bool borrowed = !alias.empty();
  contribution->borrowed = borrowed;
  const auto state =
      std::make_shared<PreconditionFuture::State>(what, out, borrowed, borrowed && Overlap(gradient, out), held_);
  contribution->result = state;
  if (gradient.size() == 0) return Submit(std::move(contribution), state, layer);
  if (borrowed) {
    contribution->tensors.push_back(
        wire::EncodeTensorHeader({spec_.gradient_dtype, {gradient.rows, gradient.cols}, 1.0f}));
    contribution->payload = alias;
    contribution->payload_owner = Borrow(state);
  } else {
    const auto payload = EncodeTensors(spec_.gradient_dtype, {gradient}, contribution->tensors);
    contribution->payload = *payload;
    contribution->payload_owner = payload;
  }
  return Submit(std::move(contribution), state, layer);
}

PreconditionFuture WorkerImpl::AbstainGradient(uint64_t step, int64_t layer) {
  const absl::StatusOr<Mode> mode = CheckStep(step, layer);
  if (!mode.ok()) return FailedFuture(mode.status());
  if (absl::Status status = CheckGradient(layer); !status.ok()) return FailedFuture(status);
  const auto state =
      std::make_shared<PreconditionFuture::State>(Describe(step, layer), MatrixView(), false, false, held_);
  if (factors_ != nullptr || NeedsNoShard(*mode)) {
    state->Complete({Decision::kSkip, 0, 0, absl::StrCat("rank ", rank_, " abstained")});
    return PreconditionFuture(state);
  }
  auto contribution = std::make_shared<Contribution>();
  contribution->id = {v1::FRAME_KIND_GRADIENT, step, static_cast<uint32_t>(layer)};
  contribution->mode = *mode;
  contribution->abstain = true;
  contribution->result = state;
  return Submit(std::move(contribution), state, layer);
}

void WorkerImpl::ExplainLate(PreconditionFuture::State& state, uint64_t step, int64_t layer) const {
  state.ExplainLateWith([missing = std::shared_ptr<const MissingRanks>(missing_ranks_),
                         shard = routes_.of_layer(static_cast<size_t>(layer))->address(), step,
                         layer] { return missing->Describe(shard, step, static_cast<uint32_t>(layer)); });
}

PreconditionFuture WorkerImpl::Submit(std::shared_ptr<Contribution> contribution,
                                      const std::shared_ptr<PreconditionFuture::State>& state, int64_t layer) {
  contribution->deadline = MonotonicNow() + options_.result_timeout;
  ExplainLate(*state, contribution->id.step, layer);
  const bool may_wait = contribution->may_wait;
  const absl::Status status = routes_.Submit(static_cast<size_t>(layer), std::move(contribution));
  if (may_wait) held_->NoteHeld();
  if (!status.ok()) state->Fail(status);
  return PreconditionFuture(state);
}

absl::StatusOr<uint64_t> WorkerImpl::FactorsChecksum(int64_t layer) {
  if (factors_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("session ", session_, " layer ", layer,
                                                      ": expected exchange REPLAY or PULL_FACTORS, got ",
                                                      ExchangeModeName(spec_.exchange)));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckLayer(layer));
  return factors_->Checksum(layer, MonotonicNow() + options_.result_timeout);
}

absl::Status WorkerImpl::Flush() {
  held_->Send();
  const absl::Time deadline = MonotonicNow() + options_.result_timeout;
  if (!send_queue_.WaitIdle(deadline)) {
    return absl::DeadlineExceededError(absl::StrCat("session ", session_,
                                                    ": gradients in device memory not computed within ",
                                                    absl::FormatDuration(options_.result_timeout)));
  }
  if (const ShardRoutes::Link late = routes_.WaitAcknowledged(deadline); late != nullptr) {
    return absl::DeadlineExceededError(
        absl::StrCat("session ", session_, ": ", late->unacknowledged(), " contributions to shard ", late->address(),
                     " not acknowledged within ", absl::FormatDuration(options_.result_timeout)));
  }
  MutexLock lock(mu_);
  PRECONDOR_RETURN_IF_ERROR(failed_);
  return std::exchange(first_refusal_, absl::OkStatus());
}

struct WorkerImpl::DeviceGradient final : DeviceSendQueue::PendingSend {
  ConstMatrixView values;
  MatrixView out;
  DType dtype = DType::kF32;
  std::shared_ptr<DeviceAnswer> device_answer;  // `answer`
  Contribution contribution;                    // without payload
};

PreconditionFuture WorkerImpl::PreconditionOnDevice(uint64_t step, int64_t layer,
                                                    const GradientBuffers::DeviceMatrix& matrix, uint64_t samples) {
  const auto& [gradient, out] = matrix;
  const absl::StatusOr<Mode> mode = CheckStep(step, layer);
  if (!mode.ok()) return FailedFuture(mode.status());
  const std::string what = Describe(step, layer);
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  absl::Status status = CheckWholeGradient(layer);
  status.Update(CheckShape(what, "gradient", ViewOf(gradient), shape.d_out, shape.d_in));
  status.Update(CheckShape(what, "out", ViewOf(out), shape.d_out, shape.d_in));
  status.Update(CheckSamples(what, samples));
  if (status.ok() && gradient.device != out.device) {
    status = absl::InvalidArgumentError(absl::StrCat(what, ": expected gradient and out on one device, got devices ",
                                                     gradient.device, " and ", out.device));
  }
  if (status.ok() && factors_ != nullptr) {
    status = absl::FailedPreconditionError(absl::StrCat(what, ": ", CheckSlots().message()));
  }
  if (!status.ok()) return FailedFuture(status);
  const absl::StatusOr<WorkerPlane*> plane = planes_.Of(gradient.device);
  if (!plane.ok()) return FailedFuture(plane.status());
  auto sent = std::make_shared<DeviceGradient>();
  for (void* stream : {gradient.stream, out.stream}) {
    if (!sent->marks.empty() && out.stream == gradient.stream) break;
    absl::StatusOr<std::unique_ptr<DevicePlane::Mark>> mark = (*plane)->plane->Record(stream);
    if (!mark.ok()) return FailedFuture(mark.status());
    sent->marks.push_back(*std::move(mark));
  }
  const auto state = std::make_shared<PreconditionFuture::State>(what, MatrixView(), false, false, held_);
  sent->what = what;
  sent->plane = *plane;
  sent->values = ViewOf(gradient);
  sent->out = ViewOf(out);
  sent->dtype = spec_.gradient_dtype;
  sent->deadline = MonotonicNow() + options_.result_timeout;
  sent->contribution.id = {v1::FRAME_KIND_GRADIENT, step, static_cast<uint32_t>(layer)};
  sent->contribution.mode = *mode;
  sent->contribution.samples = samples;
  sent->contribution.deadline = sent->deadline;
  sent->device_answer = std::make_shared<DeviceAnswer>(what, **plane, sent->out, state);
  sent->answer = sent->device_answer;
  sent->contribution.result = sent->answer;
  send_queue_.Post(std::move(sent));
  return PreconditionFuture(state);
}

absl::Status WorkerImpl::DevicePlaneStatus(int64_t layer, int device) {
  PRECONDOR_RETURN_IF_ERROR(CheckLayer(layer));
  PRECONDOR_RETURN_IF_ERROR(CheckWholeGradient(layer));
  PRECONDOR_RETURN_IF_ERROR(CheckSlots());
  const ShardRoutes::Link link = routes_.of_layer(static_cast<size_t>(layer));
  if (link == nullptr) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(link->path().SlotStatus(""));
  PRECONDOR_ASSIGN_OR_RETURN(WorkerPlane* const plane, planes_.Of(device));
  return link->path().SlotStatus(plane->plane->device());
}

void WorkerImpl::Deliver(absl::Span<const DeviceSendQueue::Item> sends) {
  std::vector<DeviceGradientPtr> first_order, others;
  for (const DeviceSendQueue::Item& item : sends) {
    auto gradient = std::static_pointer_cast<const DeviceGradient>(item);
    (NeedsNoShard(gradient->contribution.mode) ? first_order : others).push_back(std::move(gradient));
  }
  AnswerOnDevice(first_order);
  SendOnDevice(others);
}

// Answers first-order steps on the device: with the gradient itself, or SKIP if it is not finite.
void WorkerImpl::AnswerOnDevice(absl::Span<const DeviceGradientPtr> gradients) {
  std::vector<DeviceGradientPtr> used;
  std::vector<ConstMatrixView> values;
  for (const DeviceGradientPtr& gradient : gradients) {
    if (!gradient->device_answer->BeginUse()) continue;
    used.push_back(gradient);
    values.push_back(gradient->values);
  }
  if (used.empty()) return;
  DevicePlane& plane = *used.front()->plane->plane;
  const absl::StatusOr<std::vector<PayloadFacts>> facts = plane.Inspect(values);
  absl::Status status = facts.status();
  std::vector<RegionCopy> copies;
  for (size_t i = 0; i < used.size() && status.ok(); ++i) {
    if ((*facts)[i].finite && used[i]->out.data != values[i].data) copies.push_back({values[i], used[i]->out});
  }
  if (!copies.empty()) status = plane.Copy(copies);
  for (size_t i = 0; i < used.size(); ++i) {
    DeviceAnswer& answer = *used[i]->device_answer;
    answer.EndUse();
    if (!status.ok()) {
      answer.Fail(status);
    } else if ((*facts)[i].finite) {
      answer.Complete({Decision::kIdentity, 0, 0, "first order"});
    } else {
      answer.Complete({Decision::kSkip, 0, 0, "the gradient is not finite"});
    }
  }
}

void WorkerImpl::SendOnDevice(absl::Span<const DeviceGradientPtr> gradients) {
  std::vector<absl::StatusOr<std::shared_ptr<Contribution>>> placed;
  std::vector<RegionCopy> copies;
  std::vector<DeviceAnswer*> used;
  for (const DeviceGradientPtr& gradient : gradients) placed.push_back(TakeSlot(gradient));
  // TakeSlot may have waited for a shard's ring, and meanwhile another shard's may have ended.
  for (size_t i = 0; i < gradients.size(); ++i) {
    absl::StatusOr<std::shared_ptr<Contribution>>& one = placed[i];
    if (!one.ok()) continue;
    if (!(*one)->region->Holds((*one)->slot)) {
      one = absl::UnavailableError("the ring has ended");
      continue;
    }
    if (!gradients[i]->device_answer->BeginUse()) {
      (*one)->region->GiveBack((*one)->slot);
      one = absl::CancelledError(gradients[i]->what + ": there is an outcome already");
      continue;
    }
    used.push_back(gradients[i]->device_answer.get());
    const ConstMatrixView values = gradients[i]->values;
    copies.push_back({values, MatrixView((*one)->region->at((*one)->slot), values.rows, values.cols)});
  }
  const absl::Status copied = copies.empty() ? absl::OkStatus() : gradients.front()->plane->plane->Copy(copies);
  for (DeviceAnswer* const answer : used) answer->EndUse();
  // A layer's next gradient may be one that goes through the host, because the layer's slot is taken: it follows.
  std::vector<absl::Status> in_slot;
  for (const absl::StatusOr<std::shared_ptr<Contribution>>& one : placed) {
    absl::Status& status = in_slot.emplace_back(one.status());
    if (!one.ok()) continue;
    status = copied.ok() ? routes_.Submit((*one)->id.layer, *one) : copied;
    if (!status.ok()) (*one)->region->GiveBack((*one)->slot);
  }
  held_->NoteHeld();
  held_->Send();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!in_slot[i].ok()) {
      if (gradients[i]->answer->ready()) continue;  // it was late, or the worker has failed
      const absl::Status sent = SendThroughHost(*gradients[i]);
      if (!sent.ok()) gradients[i]->answer->Fail(sent);
    }
    MutexLock lock(mu_);
    ++(in_slot[i].ok() ? device_plane_.in_ring : device_plane_.over_socket);
    if (!in_slot[i].ok()) device_plane_.reason = std::string(in_slot[i].message());
  }
}

absl::Status WorkerImpl::CheckSlots() const {
  if (factors_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("expected a gradient in the host's memory, where exchange ",
                                                      ExchangeModeName(spec_.exchange),
                                                      " preconditions, got one on a device"));
  }
  if (spec_.exchange != ExchangeMode::kDelegate && spec_.world_size > 1) {
    return absl::UnavailableError("exchange DIRECT of several ranks: the shard adds their gradients up");
  }
  if (spec_.gradient_dtype != DType::kF32) {
    return absl::UnavailableError(absl::StrCat("gradient_dtype: expected F32, got ", DTypeName(spec_.gradient_dtype)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Contribution>> WorkerImpl::TakeSlot(const DeviceGradientPtr& gradient) {
  PRECONDOR_RETURN_IF_ERROR(CheckSlots());
  const size_t layer = gradient->contribution.id.layer;
  const ShardRoutes::Link link = routes_.of_layer(layer);
  if (link == nullptr) return absl::UnavailableError("the layer has no shard");
  const auto wanted = [&] {
    uint64_t bytes = 0;
    for (size_t other = 0; other < spec_.layers.size(); ++other) {
      const LayerSpec& shape = spec_.layers[other];
      const bool sends = SendsGradient(static_cast<int64_t>(other)) && routes_.of_layer(other) == link;
      if (sends) bytes += wire::SlotTable::Aligned(static_cast<uint64_t>(shape.d_out * shape.d_in) * sizeof(float));
    }
    return bytes;
  };
  auto contribution = std::make_shared<Contribution>(gradient->contribution);
  const int64_t rows = gradient->values.rows, cols = gradient->values.cols;
  const uint64_t bytes = static_cast<uint64_t>(rows * cols) * sizeof(float);
  PRECONDOR_ASSIGN_OR_RETURN(
      const PayloadPath::Place place,
      link->path().TakeSlot(gradient->plane->plane, wanted, contribution->id.layer, bytes, contribution->deadline));
  contribution->region = place.region;
  contribution->may_wait = true;
  contribution->slot = place.slot;
  contribution->tensors.push_back(wire::EncodeTensorHeader({DType::kF32, {rows, cols}, 1.0f}));
  contribution->make_inline = [gradient] { return ContributionOnHost(*gradient); };
  return contribution;
}

absl::Status WorkerImpl::SendThroughHost(const DeviceGradient& gradient) {
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<const Contribution> contribution, ContributionOnHost(gradient));
  return routes_.Submit(gradient.contribution.id.layer, std::move(contribution));
}

absl::StatusOr<std::shared_ptr<const Contribution>> WorkerImpl::ContributionOnHost(const DeviceGradient& gradient) {
  const int64_t rows = gradient.values.rows, cols = gradient.values.cols;
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(rows * cols));
  const MatrixView host(values->data(), rows, cols);
  if (!gradient.device_answer->BeginUse()) return absl::CancelledError(gradient.what + ": there is an outcome already");
  const absl::Status copied = gradient.plane->plane->Download(gradient.values, host);
  gradient.device_answer->EndUse();
  PRECONDOR_RETURN_IF_ERROR(copied);
  auto contribution = std::make_shared<Contribution>(gradient.contribution);
  const absl::Span<const uint8_t> alias = wire::AliasPayload(gradient.dtype, host);
  if (alias.empty()) {
    const auto payload = EncodeTensors(gradient.dtype, {host}, contribution->tensors);
    contribution->payload = *payload;
    contribution->payload_owner = payload;
  } else {
    contribution->tensors.push_back(wire::EncodeTensorHeader({gradient.dtype, {rows, cols}, 1.0f}));
    contribution->payload = alias;
    contribution->payload_owner = values;
  }
  return contribution;
}

}  // namespace precondor

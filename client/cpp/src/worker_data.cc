// SPDX-License-Identifier: Apache-2.0
// Sends a worker's statistics, gradients in host memory, and requests for factors.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/factor_update.h"
#include "client/cpp/src/result_state.h"
#include "client/cpp/src/worker.h"
#include "client/cpp/src/worker_input.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/registry.h"
#include "precondor/statistics.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {
namespace {

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
  factors_->NeedSecondOrder(layer, steps_->ModeSince(step));
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
  if (NeedsNoShard(*mode)) {
    if (factors_ != nullptr) factors_->Release(layer);
    return AnsweredFuture(what, gradient, out);
  }
  if (factors_ != nullptr) {
    auto state = std::make_shared<PreconditionFuture::State>(what, out, false, false);
    ExplainLate(*state, step, layer);
    factors_->Precondition(step, steps_->ModeSince(step), layer, gradient, out, state);
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
  state.ExplainLateWith([missing = missing_ranks_, shard = routes_.of_layer(static_cast<size_t>(layer))->address(),
                         epoch = epoch(), step,
                         layer] { return missing->Describe(shard, epoch, step, static_cast<uint32_t>(layer)); });
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

}  // namespace precondor

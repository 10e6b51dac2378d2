// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/result_state.h"
#include "client/cpp/src/worker_input.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "precondor/statistics.h"
#include "proto/wire/spec_codec.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {
namespace {

// How late a deadline may be noticed.
constexpr absl::Duration kTick = absl::Milliseconds(200);
// Without an answered report, between two questions whether layers have gone to other shards.
constexpr absl::Duration kAskInterval = absl::Seconds(1);
// Between two questions to a shard that does not know yet of all ranks.
constexpr absl::Duration kAskAgain = absl::Milliseconds(50);
// For gRPC to let go of borrowed memory once its connection is closed.
constexpr absl::Duration kReleaseTimeout = absl::Seconds(10);

bool Overlap(ConstMatrixView x, ConstMatrixView y) {
  if (x.size() == 0 || y.size() == 0) return false;
  const float* x_end = x.row(x.rows - 1) + x.cols;
  const float* y_end = y.row(y.rows - 1) + y.cols;
  return std::less<>()(x.data, y_end) && std::less<>()(y.data, x_end);
}

// The answer of a step in first order whose gradient is the job's average: that gradient, if it can be used.
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

void Borrowed::Add() {
  MutexLock lock(mu_);
  ++count_;
}

void Borrowed::Release() {
  MutexLock lock(mu_);
  --count_;
  changed_.notify_all();
}

void Borrowed::Wait(absl::Time deadline) {
  MutexLock lock(mu_);
  changed_.wait_until(mu_, SteadyTime(deadline), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return count_ == 0; });
}

// --- making and ending --------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<Worker>> WorkerImpl::Make(const ClientOptions& options,
                                                         std::shared_ptr<ControlClient> control, std::string session,
                                                         const WorkerOptions& as,
                                                         const v1::JoinSessionResponse& joined) {
  PRECONDOR_ASSIGN_OR_RETURN(SessionSpec spec, wire::DecodeSessionSpec(joined.spec()));
  PRECONDOR_ASSIGN_OR_RETURN(WorkerDirective directive, WorkerDirective::Decode(joined.directive()));
  std::unique_ptr<WorkerImpl> worker(new WorkerImpl(options, std::move(control), std::move(session), std::move(spec),
                                                    as.rank, as.incarnation, joined.session_id(), joined.epoch()));
  if (WorkersPrecondition(worker->spec_)) {
    PRECONDOR_ASSIGN_OR_RETURN(
        worker->factors_,
        LocalFactors::Make(worker->spec_, options.factor_threads, absl::StrCat("session ", worker->session_),
                           [worker = worker.get()](int64_t layer, const std::shared_ptr<AnswerSink>& sink) {
                             worker->FetchFactors(layer, sink);
                           }));
  }
  // Of this epoch alone: the job may have gone on for long since an earlier rollback.
  PRECONDOR_RETURN_IF_ERROR(worker->CheckResume(directive, joined.epoch() - 1, as.first_step));
  PRECONDOR_RETURN_IF_ERROR(worker->routes_.Change(joined.shard_map(), joined.epoch()));
  if (directive.rollback_epoch != 0) worker->rollback_step_ = directive.resume_step;
  worker->Start(as.first_step, std::move(directive));
  // In first order too: the shards learn that the rank has begun.
  if (worker->factors_ != nullptr) {
    const int64_t layers = static_cast<int64_t>(worker->spec_.layers.size());
    const uint64_t since = worker->steps_->ModeSince(as.first_step);
    for (int64_t layer = 0; layer < layers; ++layer) worker->factors_->Need(layer, since);
  }
  return std::unique_ptr<Worker>(std::move(worker));
}

WorkerImpl::WorkerImpl(const ClientOptions& options, std::shared_ptr<ControlClient> control, std::string session,
                       SessionSpec spec, uint32_t rank, uint64_t incarnation, uint64_t session_id, uint64_t epoch)
    : options_(options),
      control_(std::move(control)),
      session_(std::move(session)),
      spec_(std::move(spec)),
      rank_(rank),
      incarnation_(incarnation),
      session_id_(session_id),
      routes_(absl::StrCat("session ", session_), spec_.layers.size(),
              [this](const std::string& address, uint64_t of) { return MakeLink(address, of); }),
      epoch_(epoch) {}

std::shared_ptr<ShardLink> WorkerImpl::MakeLink(const std::string& address, uint64_t epoch) {
  ShardLink::Options link;
  link.address = address;
  link.security = control_->security();
  link.session = session_;
  link.session_id = session_id_;
  link.rank = rank_;
  link.incarnation = incarnation_;
  link.epoch = epoch;
  link.connect_timeout = options_.connect_timeout;
  link.result_timeout = options_.result_timeout;
  link.keep_gradients = spec_.exchange != ExchangeMode::kDelegate && spec_.world_size > 1;
  link.may_lose_shard = MayLoseShards();
  if (spec_.data_plane == DataPlane::kCollective) {
    link.plane = {.what = absl::StrCat("session ", session_, ": shard ", address, ": communicator"),
                  .rank = static_cast<int>(rank_),
                  .world_size = spec_.world_size,
                  .device = options_.plane_device,
                  .layers = spec_.layers,
                  .longest = options_.result_timeout / 2};
  }
  ShardLink::Hooks hooks;
  hooks.wake = [this] { Wake(); };
  hooks.stale_epoch = [this](uint64_t stale) { OnStaleEpoch(stale); };
  if (WorkersPrecondition(spec_)) hooks.let_go_before = [this] { return steps_->LastFirstOrder(); };
  hooks.forgotten = [this] { Ask(); };
  hooks.fatal = [this](const absl::Status& status) { Fail(status); };
  hooks.ask_plane = [this, address](uint64_t of) { return AskForPlane(address, of); };
  hooks.decline_plane = [this, address](uint64_t of, const absl::Status& why) { DeclinePlane(address, of, why); };
  hooks.refused_statistics = [this](const absl::Status& status) { OnRefusedStatistics(status); };
  return std::make_shared<ShardLink>(std::move(link), std::move(hooks), traffic_);
}

void WorkerImpl::Start(uint64_t first_step, WorkerDirective directive) {
  const std::string what = absl::StrCat("session ", session_, ": coordinator ", control_->address());
  steps_ = std::make_unique<StepControl>(StepControl::Options{what, options_.lease_timeout}, first_step,
                                         std::move(directive),
                                         [this](const OwnReport& report) { return SendReport(report); });
  timer_ = std::thread([this] { TimerLoop(); });
  refresher_ = std::thread([this] { RefreshLoop(); });
}

WorkerImpl::~WorkerImpl() {
  canceller_.Cancel();
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (timer_.joinable()) timer_.join();
  if (refresher_.joinable()) refresher_.join();
  if (steps_ != nullptr) steps_->Stop();
  if (factors_ != nullptr) factors_->Stop();
  for (const ShardRoutes::Link& link : routes_.links()) link->StopWaitingForRings();
  send_queue_.Fail(absl::CancelledError(absl::StrCat("session ", session_, ": the worker was destroyed")));
  send_queue_.Stop();
  routes_.Clear();
  // A caller may free its gradients as soon as the worker is gone.
  borrowed_->Wait(MonotonicNow() + kReleaseTimeout);
}

// --- state --------------------------------------------------------------------------------------------------------

uint64_t WorkerImpl::epoch() const {
  MutexLock lock(mu_);
  return epoch_;
}

std::string WorkerImpl::Describe(uint64_t step, int64_t layer) const {
  return absl::StrCat("session ", session_, " step ", step, " layer ", layer);
}

absl::Status WorkerImpl::CheckResume(const WorkerDirective& directive, uint64_t epoch, uint64_t next_step) const {
  if (directive.rollback_epoch <= epoch || next_step <= directive.resume_step) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleEpoch,
                        absl::StrCat("session ", session_, ": the job has gone back to step ", directive.resume_step,
                                     ", rank ", rank_, " has answers of step ", next_step - 1, ": go back to step ",
                                     directive.resume_step, " and join again with it as first_step"));
}

absl::Status WorkerImpl::CheckLayer(int64_t layer) const {
  if (layer >= 0 && layer < static_cast<int64_t>(spec_.layers.size())) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kNotFound, ErrorReason::kUnknownLayer,
      absl::StrCat("session ", session_, ": expected a layer below ", spec_.layers.size(), ", got ", layer));
}

absl::StatusOr<Mode> WorkerImpl::CheckStep(uint64_t step, int64_t layer) const {
  PRECONDOR_RETURN_IF_ERROR(CheckLayer(layer));
  {
    MutexLock lock(mu_);
    PRECONDOR_RETURN_IF_ERROR(failed_);
  }
  if (absl::Status started = steps_->AwaitLease(step); !started.ok()) {
    return ReasonedStatus(started.code(), GetErrorReason(started),
                          absl::StrCat(Describe(step, layer), ": ", started.message()));
  }
  return steps_->ModeOf(step);
}

absl::Status WorkerImpl::CheckStatistics(uint64_t step, int64_t layer) const {
  if (NeedsStatistics(step)) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotStatisticStep,
                        absl::StrCat(Describe(step, layer), ": not a statistic step with inv_freq ", spec_.inv_freq,
                                     ", warmup_steps ", spec_.warmup_steps, " and mode ", ModeName(ModeOf(step))));
}

absl::Status WorkerImpl::CheckGradient(int64_t layer) const {
  if (SendsGradient(layer)) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotDelegate,
                        absl::StrCat("session ", session_, " layer ", layer, ": rank ", DelegateRank(spec_, layer),
                                     " sends its gradient, not rank ", rank_));
}

void WorkerImpl::CountControl(const google::protobuf::MessageLite& request,
                              const google::protobuf::MessageLite& response) {
  traffic_.overhead_bytes.fetch_add(static_cast<int64_t>(request.ByteSizeLong() + response.ByteSizeLong()),
                                    std::memory_order_relaxed);
}

// --- data plane ---------------------------------------------------------------------------------------------------

absl::Status WorkerImpl::SendStatistics(uint64_t step, int64_t layer, ConstMatrixView a, ConstMatrixView g,
                                        uint64_t samples) {
  PRECONDOR_ASSIGN_OR_RETURN(const Mode mode, CheckStep(step, layer));
  PRECONDOR_RETURN_IF_ERROR(CheckStatistics(step, layer));
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  const std::string what = Describe(step, layer);
  const auto check = [&](const char* name, ConstMatrixView side, int64_t d) {
    // A triangle stands for any number of rows; no rank sends none.
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
  factors_->Need(layer, steps_->ModeSince(step));
  std::shared_ptr<AnswerSink> update = factors_->Expect(layer, step);
  if (update == nullptr) {
    return absl::AlreadyExistsError(absl::StrCat(Describe(step, layer), ": sent already and not yet answered"));
  }
  absl::Status sent = routes_.Submit(static_cast<size_t>(layer), std::move(statistics));
  if (sent.ok()) sent = SendRequest(v1::FRAME_KIND_PULL, step, layer, std::move(update));
  if (!sent.ok()) factors_->Forget(layer, step);
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

// An owner of the caller's memory: its end says that neither the outbox nor gRPC reads it any more.
std::shared_ptr<const void> WorkerImpl::Borrow(const std::shared_ptr<PreconditionFuture::State>& state) {
  borrowed_->Add();
  return std::shared_ptr<const void>(state.get(), [state, borrowed = borrowed_](const void*) {
    state->OnPayloadReleased();
    borrowed->Release();
  });
}

PreconditionFuture WorkerImpl::Precondition(uint64_t step, int64_t layer, ConstMatrixView gradient, MatrixView out,
                                            uint64_t samples) {
  const absl::StatusOr<Mode> mode = CheckStep(step, layer);
  if (!mode.ok()) return FailedFuture(mode.status());
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  const std::string what = Describe(step, layer);
  absl::Status status = CheckGradient(layer);
  status.Update(CheckShape(what, "gradient", gradient, shape.d_out, shape.d_in));
  status.Update(CheckShape(what, "out", out, shape.d_out, shape.d_in));
  status.Update(CheckSamples(what, samples));
  if (!status.ok()) return FailedFuture(status);
  if (AnsweredHere(*mode)) {
    if (factors_ != nullptr) factors_->Release(layer);
    return AnsweredFuture(what, gradient, out);
  }
  if (factors_ != nullptr) {
    auto state = std::make_shared<PreconditionFuture::State>(what, out, false, false);
    factors_->Precondition(step, steps_->ModeSince(step), layer, gradient, out, state);
    return PreconditionFuture(std::move(state));
  }
  auto contribution = std::make_shared<Contribution>();
  contribution->id = {v1::FRAME_KIND_GRADIENT, step, static_cast<uint32_t>(layer)};
  contribution->mode = *mode;
  contribution->samples = samples;
  const absl::Span<const uint8_t> alias = wire::AliasPayload(spec_.gradient_dtype, gradient);
  const bool borrowed = !alias.empty();
  contribution->borrowed = borrowed;
  const auto state =
      std::make_shared<PreconditionFuture::State>(what, out, borrowed, borrowed && Overlap(gradient, out));
  contribution->result = state;
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
  const auto state = std::make_shared<PreconditionFuture::State>(Describe(step, layer), MatrixView(), false, false);
  if (factors_ != nullptr || AnsweredHere(*mode)) {
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

PreconditionFuture WorkerImpl::Submit(std::shared_ptr<Contribution> contribution,
                                      const std::shared_ptr<PreconditionFuture::State>& state, int64_t layer) {
  contribution->deadline = MonotonicNow() + options_.result_timeout;
  const absl::Status status = routes_.Submit(static_cast<size_t>(layer), std::move(contribution));
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

// --- control ------------------------------------------------------------------------------------------------------

absl::StatusOr<StepDirective> WorkerImpl::ReportStep(uint64_t step, double loss, uint64_t samples, bool finite,
                                                     double learning_rate) {
  return steps_->Report(
      {.step = step, .loss = loss, .samples = samples, .finite = finite, .learning_rate = learning_rate});
}

absl::StatusOr<WorkerDirective> WorkerImpl::SendReport(const OwnReport& report) {
  v1::ReportStepRequest request;
  request.set_session_id(session_id_);
  request.set_rank(rank_);
  request.set_incarnation(incarnation_);
  request.set_step(report.step);
  request.set_loss(report.loss);
  request.set_samples(report.samples);
  request.set_finite(report.finite);
  request.set_learning_rate(report.learning_rate);
  while (true) {
    const uint64_t used = epoch();
    request.set_epoch(used);
    const absl::StatusOr<v1::ReportStepResponse> response = control_->ReportStep(request, canceller_);
    if (!response.ok()) {
      const Recovery recovery = RecoveryFor(response.status());
      if (recovery == Recovery::kFatal) Fail(response.status());
      if (recovery != Recovery::kRefreshEpoch) return response.status();
      OnStaleEpoch(used);
      if (!AwaitEpochAfter(used)) return response.status();
      continue;
    }
    CountControl(request, *response);
    {
      MutexLock lock(mu_);
      epoch_known_at_ = MonotonicNow();
    }
    if (response->directive().epoch() != used) OnStaleEpoch(used);
    return WorkerDirective::Decode(response->directive());
  }
}

void WorkerImpl::Cancel() {
  canceller_.Cancel();
  Fail(absl::CancelledError(absl::StrCat("session ", session_, " rank ", rank_, ": the worker was cancelled")));
}

absl::Status WorkerImpl::Leave() {
  v1::LeaveSessionRequest request;
  request.set_session_id(session_id_);
  request.set_rank(rank_);
  request.set_incarnation(incarnation_);
  return control_->LeaveSession(request, canceller_).status();
}

void WorkerImpl::Wake() {
  MutexLock lock(mu_);
  wake_ = true;
  changed_.notify_all();
}

void WorkerImpl::OnStaleEpoch(uint64_t epoch) {
  MutexLock lock(mu_);
  if (epoch != epoch_) return;  // joined again since
  refresh_ = true;
  changed_.notify_all();
}

void WorkerImpl::Ask() {
  MutexLock lock(mu_);
  ask_ = true;
  changed_.notify_all();
}

void WorkerImpl::OnRefusedStatistics(const absl::Status& status) {
  MutexLock lock(mu_);
  if (first_refusal_.ok()) first_refusal_ = status;
}

void WorkerImpl::Fail(const absl::Status& status) {
  {
    MutexLock lock(mu_);
    if (!failed_.ok()) return;
    failed_ = status;
    changed_.notify_all();
  }
  if (steps_ != nullptr) steps_->Fail(status);
  if (factors_ != nullptr) factors_->Fail(status);
  send_queue_.Fail(status);
  routes_.Fail(status);
}

void WorkerImpl::TimerLoop() {
  absl::Time ask_at = absl::InfinitePast();
  while (true) {
    const absl::Time now = MonotonicNow();
    absl::Time next = std::min(now + kTick, send_queue_.Tick(now));
    for (const ShardRoutes::Link& link : routes_.links()) next = std::min(next, link->Tick(now));
    MutexLock lock(mu_);
    if (MayLoseShards() && epoch_known_at_ + kAskInterval <= now && ask_at <= now) {
      ask_ = true;
      ask_at = now + kAskInterval;
      changed_.notify_all();
    }
    changed_.wait_until(mu_, SteadyTime(next),
                        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || wake_; });
    if (stopping_) return;
    wake_ = false;
  }
}

void WorkerImpl::RefreshLoop() {
  while (true) {
    bool refresh = false;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || refresh_ || ask_; });
      if (stopping_) return;
      refresh = refresh_;
      ask_ = false;
    }
    if (!refresh) {
      AskForEpoch();
      continue;
    }
    const absl::Status status = Refresh();
    if (status.ok()) continue;
    Fail(status);
    return;
  }
}

v1::JoinSessionRequest WorkerImpl::JoinRequest() const {
  v1::JoinSessionRequest request;
  request.set_name(session_);
  request.set_rank(rank_);
  request.set_incarnation(incarnation_);
  request.set_first_step(steps_->next_step());
  return request;
}

absl::StatusOr<v1::JoinSessionResponse> WorkerImpl::JoinAgain() {
  const absl::Time deadline = MonotonicNow() + options_.lease_timeout;
  while (true) {
    const absl::Time begun = MonotonicNow();
    absl::StatusOr<v1::JoinSessionResponse> joined =
        JoinUntilActive(*control_, JoinRequest(), options_.join_timeout, canceller_);
    // A coordinator that is gone is waited for; ranks that are missing have had their time.
    const bool gone = joined.status().code() == absl::StatusCode::kUnavailable ||
                      (joined.status().code() == absl::StatusCode::kDeadlineExceeded &&
                       MonotonicNow() - begun < options_.join_timeout);
    if (!gone || MonotonicNow() >= deadline || !canceller_.Pause(kTick)) return joined;
  }
}

void WorkerImpl::AskForEpoch() {
  const uint64_t have = epoch();
  const absl::StatusOr<v1::JoinSessionResponse> joined = control_->JoinSession(JoinRequest(), canceller_);
  if (joined.ok()) {
    MutexLock lock(mu_);
    epoch_known_at_ = MonotonicNow();
  }
  if (joined.ok() && joined->session_id() != session_id_) {
    Fail(
        ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                       absl::StrCat("session ", session_, ": expected session_id ", session_id_,
                                    ", which has been closed; there is another of this name, ", joined->session_id())));
    return;
  }
  if (joined.ok() && joined->epoch() != have) OnStaleEpoch(have);
  // A coordinator that cannot be reached, or a shard that it waits for, will be asked again.
  if (!joined.ok() && RecoveryFor(joined.status()) == Recovery::kFatal) Fail(joined.status());
}

absl::Status WorkerImpl::Refresh() {
  PRECONDOR_ASSIGN_OR_RETURN(const v1::JoinSessionResponse joined, JoinAgain());
  PRECONDOR_ASSIGN_OR_RETURN(WorkerDirective directive, WorkerDirective::Decode(joined.directive()));
  // Answers of a step that it has not finished bind it just so.
  const std::optional<uint64_t> answered = routes_.answered_through();
  const uint64_t next_step = std::max(steps_->next_step(), answered.has_value() ? *answered + 1 : 0);
  PRECONDOR_RETURN_IF_ERROR(CheckResume(directive, epoch(), next_step));
  steps_->Adopt(std::move(directive));
  {
    MutexLock lock(mu_);
    refresh_ = false;
    epoch_ = joined.epoch();
    changed_.notify_all();
  }
  return routes_.Change(joined.shard_map(), joined.epoch());
}

v1::JoinPlaneRequest WorkerImpl::PlaneRequest(uint64_t epoch) const {
  v1::JoinPlaneRequest request;
  request.set_session_id(session_id_);
  request.set_epoch(epoch);
  request.set_rank(rank_);
  request.set_incarnation(incarnation_);
  return request;
}

void WorkerImpl::DeclinePlane(const std::string& address, uint64_t epoch, const absl::Status& why) {
  v1::JoinPlaneRequest request = PlaneRequest(epoch);
  request.set_declined(std::string(why.message()));
  // A peer that cannot be told waits until the rendezvous ends.
  ControlClient(address, options_.connect_timeout, control_->security()).JoinPlane(request, canceller_).IgnoreError();
}

absl::StatusOr<PlaneRendezvous> WorkerImpl::AskForPlane(const std::string& address, uint64_t epoch) {
  ControlClient shard(address, options_.rpc_timeout, control_->security());
  const absl::Time deadline = MonotonicNow() + options_.connect_timeout;
  const v1::JoinPlaneRequest request = PlaneRequest(epoch);
  while (true) {
    const absl::StatusOr<v1::JoinPlaneResponse> response = shard.JoinPlane(request, canceller_);
    if (response.ok()) {
      CountControl(request, *response);
      PlaneRendezvous rendezvous{.transport = response->transport(),
                                 .unique_id = response->unique_id(),
                                 .timeout = absl::Milliseconds(response->timeout_ms()),
                                 .buckets = {}};
      for (const v1::PlaneBucket& bucket : response->buckets()) {
        rendezvous.buckets.emplace_back(bucket.layers().begin(), bucket.layers().end());
      }
      return rendezvous;
    }
    const bool again = RecoveryFor(response.status()) == Recovery::kRetryLater && MonotonicNow() < deadline;
    if (!again || !canceller_.Pause(kAskAgain)) return response.status();
  }
}

absl::Status WorkerImpl::DataPlaneStatus() const {
  for (const ShardRoutes::Link& link : routes_.links()) PRECONDOR_RETURN_IF_ERROR(link->plane_status());
  return absl::OkStatus();
}

bool WorkerImpl::AwaitEpochAfter(uint64_t stale) {
  MutexLock lock(mu_);
  changed_.wait_for(mu_, absl::ToChronoNanoseconds(options_.rpc_timeout),
                    [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || epoch_ != stale || !failed_.ok(); });
  return epoch_ != stale && failed_.ok();
}

}  // namespace precondor

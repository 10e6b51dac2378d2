// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/worker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"

namespace precondor {
namespace {

// Longest wait for gRPC to release borrowed memory after its connection was closed.
constexpr absl::Duration kReleaseTimeout = absl::Seconds(10);

std::shared_ptr<MissingRanks> MakeMissingRanks(const SessionSpec& spec, uint32_t rank, uint64_t incarnation,
                                               const v1::JoinSessionResponse& joined,
                                               std::shared_ptr<const wire::ChannelSecurity> security) {
  v1::FrameHeader sender;
  sender.set_session_id(joined.session_id());
  sender.set_rank(rank);
  sender.set_incarnation(incarnation);
  sender.set_secret(joined.secret());
  sender.set_epoch(joined.epoch());
  std::vector<std::string> layers;
  for (const LayerSpec& layer : spec.layers) layers.push_back(layer.name);
  return std::make_shared<MissingRanks>(std::move(sender), std::move(layers), std::move(security));
}

// Longest delay until a passed deadline is noticed.
constexpr absl::Duration kTick = absl::Milliseconds(200);

// The coordinator refuses greater times.
constexpr absl::Duration kLongestAgo = absl::Hours(24);

// Fills a ReportStepRequest, or one of its earlier steps.
template <typename Step>
void SetStep(const OwnReport& report, Step& step) {
  step.set_step(report.step);
  step.set_loss(report.loss);
  step.set_samples(report.samples);
  step.set_finite(report.finite);
  step.set_learning_rate(report.learning_rate);
  step.set_seconds_ago(absl::ToDoubleSeconds(std::min(MonotonicNow() - report.finished, kLongestAgo)));
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
  if (!as.factor_versions.empty() && as.factor_versions.size() != spec.layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat("session ", session, ": factor_versions: expected ",
                                                   spec.layers.size(), ", one a layer, got ",
                                                   as.factor_versions.size()));
  }
  std::unique_ptr<WorkerImpl> worker(new WorkerImpl(options, std::move(control), std::move(session), std::move(spec),
                                                    as.rank, as.incarnation, joined));
  if (WorkersPrecondition(worker->spec_)) {
    PRECONDOR_ASSIGN_OR_RETURN(
        worker->factors_,
        LocalFactors::Make(worker->spec_, options.factor_threads, absl::StrCat("session ", worker->session_),
                           [worker = worker.get()](int64_t layer, const std::shared_ptr<AnswerSink>& sink) {
                             worker->FetchFactors(layer, sink);
                           }));
  }
  // Only for a rollback in this epoch: after an earlier one the job may have finished many steps.
  PRECONDOR_RETURN_IF_ERROR(worker->CheckResume(directive, joined.epoch() - 1, as.first_step));
  PRECONDOR_RETURN_IF_ERROR(worker->routes_.Change(joined.shard_map(), joined.epoch()));
  if (directive.rollback_epoch != 0) worker->joined_.rollback_step = directive.resume_step;
  worker->Start(as.first_step, std::move(directive));
  // In first order too, because a FETCH tells the shards that this rank has begun.
  if (worker->factors_ != nullptr) {
    const int64_t layers = static_cast<int64_t>(worker->spec_.layers.size());
    for (int64_t layer = 0; layer < layers; ++layer) worker->factors_->Need(layer);
  } else if (as.first_step > 0) {
    worker->routes_.BeginAt(as.first_step, as.factor_versions);
  }
  return std::unique_ptr<Worker>(std::move(worker));
}

WorkerImpl::WorkerImpl(const ClientOptions& options, std::shared_ptr<ControlClient> control, std::string session,
                       SessionSpec spec, uint32_t rank, uint64_t incarnation, const v1::JoinSessionResponse& joined)
    : options_(options),
      control_(std::move(control)),
      session_(std::move(session)),
      joined_{.spec = std::move(spec), .rank = rank, .rollback_step = std::nullopt},
      incarnation_(incarnation),
      session_id_(joined.session_id()),
      secret_(joined.secret()),
      missing_ranks_(MakeMissingRanks(spec_, rank, incarnation, joined, control_->security())),
      routes_(absl::StrCat("session ", session_), spec_.layers.size(),
              [this](const std::string& address, uint64_t of) { return MakeLink(address, of); }),
      send_queue_([this](absl::Span<const DeviceSendQueue::Item> sends) { Deliver(sends); }, CountSentGradients()),
      epoch_(joined.epoch()) {}

size_t WorkerImpl::CountSentGradients() const {
  size_t count = 0;
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) count += SendsGradient(static_cast<int64_t>(layer));
  return count;
}

std::shared_ptr<ShardLink> WorkerImpl::MakeLink(const std::string& address, uint64_t epoch) {
  ShardLink::Options link;
  link.address = address;
  link.security = control_->security();
  link.traceparent = control_->traceparent();
  link.session = session_;
  link.session_id = session_id_;
  link.rank = rank_;
  link.incarnation = incarnation_;
  link.secret = secret_;
  link.epoch = epoch;
  link.connect_timeout = options_.connect_timeout;
  link.result_timeout = options_.result_timeout;
  link.keep_gradients = spec_.exchange != ExchangeMode::kDelegate && spec_.world_size > 1;
  ShardLink::Hooks hooks;
  hooks.wake = [this] { Wake(); };
  hooks.stale_epoch = [this](uint64_t stale) { OnStaleEpoch(stale); };
  if (!WorkersPrecondition(spec_)) hooks.last_first_order = [this] { return steps_->LastFirstOrder(); };
  hooks.forgotten = [this] { Ask(); };
  hooks.fatal = [this](const absl::Status& status) { Fail(status); };
  hooks.refused_statistics = [this](const absl::Status& status) { OnRefusedStatistics(status); };
  hooks.updates_lost = [this](uint32_t layer, uint64_t updates) {
    // With several ranks such a loss ends the workers.
    if (factors_ != nullptr && spec_.world_size == 1) factors_->Refetch(layer);
    MutexLock lock(mu_);
    lost_updates_[layer] += updates;
  };
  return std::make_shared<ShardLink>(std::move(link), std::move(hooks), traffic_);
}

void WorkerImpl::Start(uint64_t first_step, WorkerDirective directive) {
  const std::string what = absl::StrCat("session ", session_, ": coordinator ", control_->address());
  steps_ = std::make_shared<StepControl>(StepControl::Options{what, options_.lease_timeout}, first_step,
                                         std::move(directive),
                                         [this](absl::Span<const OwnReport> reports) { return SendReports(reports); });
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
  for (const ShardRoutes::Link& link : routes_.links()) link->path().StopWaiting();
  send_queue_.Fail(absl::CancelledError(absl::StrCat("session ", session_, ": the worker was destroyed")));
  send_queue_.Stop();
  held_->Stop();
  routes_.Clear();
  // A caller may free its gradients as soon as the worker is destroyed.
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

WorkerStatus WorkerImpl::status() const {
  WorkerStatus status;
  status.traffic = traffic_.Read();
  {
    MutexLock lock(mu_);
    status.epoch = epoch_;
    status.device_plane = device_plane_;
    status.lost_updates = lost_updates_;
  }
  for (const ShardRoutes::Link& link : routes_.links()) {
    if (std::string backend = link->backend(); !backend.empty()) {
      status.device_plane.backends.insert(std::move(backend));
    }
  }
  return status;
}

absl::Status WorkerImpl::CheckResume(const WorkerDirective& directive, uint64_t epoch, uint64_t next_step) const {
  if (!directive.LeavesBehind(epoch, next_step)) return absl::OkStatus();
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
  if (ModeOf(step) == Mode::kSecondOrder && IsStatisticStep(spec_, step)) return absl::OkStatus();
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

absl::Status WorkerImpl::CheckWholeGradient(int64_t layer) const {
  if (spec_.exchange != ExchangeMode::kSharded) return CheckGradient(layer);
  return absl::FailedPreconditionError(absl::StrCat("session ", session_, " layer ", layer,
                                                    ": exchange SHARDED takes parts of gradients, got a whole one"));
}

void WorkerImpl::CountControl(const google::protobuf::MessageLite& request,
                              const google::protobuf::MessageLite& response) {
  traffic_.overhead_bytes.fetch_add(static_cast<int64_t>(request.ByteSizeLong() + response.ByteSizeLong()),
                                    std::memory_order_relaxed);
}

// --- control ------------------------------------------------------------------------------------------------------

ReportFuture WorkerImpl::ReportStep(uint64_t step, double loss, uint64_t samples, bool finite, double learning_rate) {
  held_->Send();
  return steps_->Begin({.step = step,
                        .loss = loss,
                        .samples = samples,
                        .finite = finite,
                        .learning_rate = learning_rate,
                        .finished = MonotonicNow()});
}

absl::StatusOr<WorkerDirective> WorkerImpl::SendReports(absl::Span<const OwnReport> reports) {
  v1::ReportStepRequest request;
  request.set_session_id(session_id_);
  request.set_rank(rank_);
  request.set_incarnation(incarnation_);
  request.set_secret(secret_);
  while (true) {
    const uint64_t used = epoch();
    request.set_epoch(used);
    request.clear_earlier();
    for (const OwnReport& report : reports.first(reports.size() - 1)) SetStep(report, *request.add_earlier());
    SetStep(reports.back(), request);
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
    if (response->directive().epoch() != used) OnStaleEpoch(used);
    return WorkerDirective::Decode(response->directive());
  }
}

void WorkerImpl::Cancel() {
  canceller_.Cancel();
  Fail(absl::CancelledError(absl::StrCat("session ", session_, " rank ", rank_, ": the worker was cancelled")));
}

absl::Status WorkerImpl::Leave() {
  held_->Send();
  v1::LeaveSessionRequest request;
  request.set_session_id(session_id_);
  request.set_rank(rank_);
  request.set_incarnation(incarnation_);
  request.set_secret(secret_);
  return control_->LeaveSession(request, canceller_);
}

void WorkerImpl::Wake() {
  MutexLock lock(mu_);
  wake_ = true;
  changed_.notify_all();
}

void WorkerImpl::OnStaleEpoch(uint64_t epoch) {
  MutexLock lock(mu_);
  if (epoch != epoch_) return;  // the worker has joined again since
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
  NameThisThread("precondor-timer");
  while (true) {
    const absl::Time now = MonotonicNow();
    absl::Time next = std::min(now + kTick, send_queue_.Tick(now));
    for (const ShardRoutes::Link& link : routes_.links()) next = std::min(next, link->Tick(now));
    MutexLock lock(mu_);
    changed_.wait_until(mu_, SteadyTime(next),
                        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || wake_; });
    if (stopping_) return;
    wake_ = false;
  }
}

void WorkerImpl::RefreshLoop() {
  NameThisThread("precondor-join");
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
  request.set_secret(secret_);
  return request;
}

absl::StatusOr<v1::JoinSessionResponse> WorkerImpl::JoinAgain() {
  const absl::Time deadline = MonotonicNow() + options_.lease_timeout;
  while (true) {
    const absl::Time begun = MonotonicNow();
    absl::StatusOr<v1::JoinSessionResponse> joined =
        JoinUntilActive(*control_, JoinRequest(), options_.join_timeout, canceller_);
    // Waits for an unreachable coordinator, but not for missing ranks beyond join_timeout.
    const bool gone = joined.status().code() == absl::StatusCode::kUnavailable ||
                      (joined.status().code() == absl::StatusCode::kDeadlineExceeded &&
                       MonotonicNow() - begun < options_.join_timeout);
    if (!gone || MonotonicNow() >= deadline || !canceller_.Pause(kTick)) return joined;
  }
}

void WorkerImpl::AskForEpoch() {
  const uint64_t have = epoch();
  const auto joined = control_->Call<v1::JoinSessionResponse>(JoinRequest(), canceller_);
  if (joined.ok() && joined->session_id() != session_id_) {
    Fail(
        ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                       absl::StrCat("session ", session_, ": expected session_id ", session_id_,
                                    ", which has been closed; there is another of this name, ", joined->session_id())));
    return;
  }
  if (joined.ok() && joined->epoch() != have) OnStaleEpoch(have);
  // If the coordinator is unreachable or waits for a shard, the timer asks again. PERMISSION_DENIED means that another
  // session has this name now.
  const bool denied = absl::IsPermissionDenied(joined.status());
  if (denied || (!joined.ok() && RecoveryFor(joined.status()) == Recovery::kFatal)) Fail(joined.status());
}

absl::Status WorkerImpl::Refresh() {
  PRECONDOR_ASSIGN_OR_RETURN(const v1::JoinSessionResponse joined, JoinAgain());
  PRECONDOR_ASSIGN_OR_RETURN(WorkerDirective directive, WorkerDirective::Decode(joined.directive()));
  // Answers to an unfinished step also prevent this rank from beginning earlier.
  const std::optional<uint64_t> answered = routes_.answered_through();
  const uint64_t next_step = std::max(steps_->next_step(), answered.has_value() ? *answered + 1 : 0);
  PRECONDOR_RETURN_IF_ERROR(CheckResume(directive, epoch(), next_step));
  steps_->Adopt(std::move(directive));
  {
    MutexLock lock(mu_);
    refresh_ = false;
    epoch_ = joined.epoch();
    missing_ranks_->BeginEpoch(epoch_);
    changed_.notify_all();
  }
  return routes_.Change(joined.shard_map(), joined.epoch());
}

bool WorkerImpl::AwaitEpochAfter(uint64_t stale) {
  MutexLock lock(mu_);
  changed_.wait_for(mu_, absl::ToChronoNanoseconds(options_.rpc_timeout),
                    [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || epoch_ != stale || !failed_.ok(); });
  return epoch_ != stale && failed_.ok();
}

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/local_factors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/clock.h"
#include "kernels/base/dtype.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

bool IsFinite(ConstMatrixView x) {
  for (int64_t row = 0; row < x.rows; ++row) {
    if (!AllFinite(absl::MakeConstSpan(x.row(row), static_cast<size_t>(x.cols)))) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalFactors>> LocalFactors::Make(const SessionSpec& spec, int threads, std::string what,
                                                                 Fetch fetch) {
  PRECONDOR_ASSIGN_OR_RETURN(MethodSet methods, MethodSet::Make(spec));
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeCpuBackend({}));
  return MakeWith(spec, std::move(methods), std::move(backend), std::max(threads, 1), std::move(what),
                  std::move(fetch));
}

std::unique_ptr<LocalFactors> LocalFactors::MakeWith(const SessionSpec& spec, MethodSet methods,
                                                     std::unique_ptr<Backend> backend, int threads, std::string what,
                                                     Fetch fetch) {
  std::unique_ptr<LocalFactors> factors(
      new LocalFactors(spec, std::move(what), std::move(fetch), std::move(methods), std::move(backend)));
  for (int i = 0; i < threads; ++i) {
    factors->threads_.emplace_back([factors = factors.get()] {
      NameThisThread("precondor-local");
      factors->Loop();
    });
  }
  return factors;
}

LocalFactors::LocalFactors(SessionSpec spec, std::string what, Fetch fetch, MethodSet methods,
                           std::unique_ptr<Backend> backend)
    : spec_(std::move(spec)),
      what_(std::move(what)),
      fetch_(std::move(fetch)),
      methods_(std::move(methods)),
      backend_(std::move(backend)),
      layers_(spec_.layers.size()),
      states_(spec_.layers.size()) {
  // Layers whose method takes no statistics have no factors to fetch.
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!methods_.of(static_cast<int64_t>(i)).needs_statistics()) layers_[i].sync_state = SyncState::kKnown;
  }
}

LocalFactors::~LocalFactors() { Stop(); }

void LocalFactors::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  Fail(absl::CancelledError(absl::StrCat(what_, ": the worker was destroyed")));
}

std::string LocalFactors::Describe(int64_t layer) const { return absl::StrCat(what_, " layer ", layer); }

absl::StatusOr<uint64_t> LocalFactors::Checksum(int64_t index, absl::Time deadline) {
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    const bool rests = at_rest_.wait_until(mu_, SteadyTime(deadline), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const bool waits = layer.sync_state == SyncState::kFetching || layer.fetched.has_value() || !layer.open.empty();
      return !failed_.ok() || (!layer.busy && !layer.queued && !waits);
    });
    PRECONDOR_RETURN_IF_ERROR(failed_);
    if (!rests) return absl::DeadlineExceededError(absl::StrCat(Describe(index), ": its factors have not come"));
    layer.busy = true;
  }
  const LayerState* const state = states_[static_cast<size_t>(index)].get();
  const absl::StatusOr<std::string> saved = state == nullptr ? std::string() : state->Save();
  MutexLock lock(mu_);
  layers_[static_cast<size_t>(index)].busy = false;
  at_rest_.notify_all();
  Wake(index);
  PRECONDOR_RETURN_IF_ERROR(saved.status());
  return saved->empty() ? 0 : SavedChecksum(*saved);
}

void LocalFactors::Wake(int64_t index) {
  Layer& layer = layers_[static_cast<size_t>(index)];
  if (layer.busy || layer.queued) return;
  layer.queued = true;
  ready_.push_back(index);
  changed_.notify_one();
}

// --- sinks for answers --------------------------------------------------------------------------------------------

std::shared_ptr<AnswerSink> LocalFactors::MakeSink(int64_t layer, const std::string& what,
                                                   FactorUpdateSink::Done done) const {
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  FactorUpdateSink::Limits limits;
  limits.dims = {shape.d_in, shape.d_out};
  limits.most_rows = spec_.exchange == ExchangeMode::kReplay ? VectorsPerStep(spec_, layer) : 0;
  limits.most_bytes = methods_.of(layer).SavedBytes(shape);
  return std::make_shared<FactorUpdateSink>(what, limits, std::move(done));
}

void LocalFactors::StartFetch(int64_t layer) {
  fetch_(layer, MakeSink(layer, absl::StrCat(Describe(layer), ": factors"),
                         [this, layer](absl::StatusOr<FactorUpdate> fetched) {
                           MutexLock lock(mu_);
                           layers_[static_cast<size_t>(layer)].fetched = std::move(fetched);
                           Wake(layer);
                         }));
}

void LocalFactors::Need(int64_t index) {
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    if (!failed_.ok() || layer.sync_state != SyncState::kUnknown) return;
    layer.sync_state = SyncState::kFetching;
    layer.outdated = false;
  }
  StartFetch(index);
}

void LocalFactors::Refetch(int64_t index) {
  MutexLock lock(mu_);
  if (!methods_.of(index).needs_statistics()) return;
  layers_[static_cast<size_t>(index)].outdated = true;
  Wake(index);
}

std::shared_ptr<AnswerSink> LocalFactors::ExpectUpdate(int64_t layer, uint64_t step) {
  {
    MutexLock lock(mu_);
    Layer& expecting = layers_[static_cast<size_t>(layer)];
    if (!expecting.open.insert(step).second) return nullptr;
    expecting.last_expected = step;
    expecting.failure.reset();
  }
  return MakeSink(layer, absl::StrCat(Describe(layer), " step ", step, ": update"),
                  [this, layer, step](absl::StatusOr<FactorUpdate> received) {
                    MutexLock lock(mu_);
                    Layer& expecting = layers_[static_cast<size_t>(layer)];
                    if (expecting.open.contains(step))
                      expecting.received.insert({step, {.factors = std::move(received)}});
                    Wake(layer);
                  });
}

void LocalFactors::CancelUpdate(int64_t layer, uint64_t step) {
  MutexLock lock(mu_);
  layers_[static_cast<size_t>(layer)].open.erase(step);
  layers_[static_cast<size_t>(layer)].received.erase(step);
  Wake(layer);
}

// --- requests -----------------------------------------------------------------------------------------------------

absl::Status LocalFactors::CheckStep(const Layer& layer, int64_t index, uint64_t step) const {
  PRECONDOR_RETURN_IF_ERROR(failed_);
  if (layer.last_expected.has_value() && *layer.last_expected > step) {
    return absl::FailedPreconditionError(absl::StrCat(Describe(index), ": expected the gradient of step ", step,
                                                      " before the statistics of step ", *layer.last_expected));
  }
  const bool due = IsStatisticStep(spec_, step) && methods_.of(index).needs_statistics();
  if (!due || layer.last_expected == step) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(Describe(index), ": expected the statistics of step ", step,
                                                    ", or an abstention from them, before its gradient"));
}

void LocalFactors::Precondition(uint64_t step, int64_t layer, ConstMatrixView gradient, MatrixView out,
                                const std::shared_ptr<PreconditionFuture::State>& answer) {
  absl::Status status;
  {
    MutexLock lock(mu_);
    Layer& asked = layers_[static_cast<size_t>(layer)];
    status = CheckStep(asked, layer, step);
    if (asked.failure.has_value() && asked.failure->first == step) status.Update(asked.failure->second);
    if (status.ok()) {
      asked.requests.push_back({step, gradient, out, answer});
      Wake(layer);
    }
  }
  if (!status.ok()) answer->Fail(status);
  Need(layer);  // last: a FETCH that fails before the request is queued would leave it without one
}

void LocalFactors::Fail(const absl::Status& status) {
  std::vector<Request> failed;
  {
    MutexLock lock(mu_);
    if (failed_.ok()) failed_ = status;
    at_rest_.notify_all();
    for (Layer& layer : layers_) {
      std::move(layer.requests.begin(), layer.requests.end(), std::back_inserter(failed));
      layer.requests.clear();
    }
  }
  for (const Request& request : failed) request.answer->Fail(status);
}

void LocalFactors::GiveUp(int64_t index, uint64_t from_step, const absl::Status& why) {
  std::vector<Request> failed;
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    layer.sync_state = SyncState::kUnknown;
    const auto first = std::find_if(layer.requests.begin(), layer.requests.end(),
                                    [&](const Request& request) { return request.step >= from_step; });
    std::move(first, layer.requests.end(), std::back_inserter(failed));
    layer.requests.erase(first, layer.requests.end());
  }
  for (const Request& request : failed) request.answer->Fail(why);
}

void LocalFactors::Loop() {
  while (true) {
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !ready_.empty(); });
      if (stopping_) return;
    }
    Work();
  }
}

bool LocalFactors::Work() {
  int64_t index = 0;
  {
    MutexLock lock(mu_);
    if (ready_.empty()) return false;
    index = ready_.front();
    ready_.pop_front();
    layers_[static_cast<size_t>(index)].queued = false;
    layers_[static_cast<size_t>(index)].busy = true;
  }
  while (WorkOn(index)) {
  }
  return true;
}

bool LocalFactors::WorkOn(int64_t index) {
  std::optional<absl::StatusOr<FactorUpdate>> fetched;
  std::optional<std::pair<uint64_t, ReceivedUpdate>> received;
  std::optional<Request> request;
  bool fetches = false;
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    const bool known = layer.sync_state == SyncState::kKnown;
    const bool due = known && !layer.requests.empty();
    const bool told = known && !layer.open.empty();
    if (layer.fetched.has_value()) {
      fetched = std::exchange(layer.fetched, std::nullopt);
    } else if (known && std::exchange(layer.outdated, false)) {
      layer.sync_state = SyncState::kFetching;
      fetches = true;
    } else if (due && (layer.open.empty() || layer.requests.front().step < *layer.open.begin())) {
      request = std::move(layer.requests.front());
      layer.requests.pop_front();
    } else if (told && !layer.received.empty() && layer.received.begin()->first == *layer.open.begin()) {
      auto first = layer.received.extract(layer.received.begin());
      received.emplace(first.key(), std::move(first.mapped()));
    } else {
      layer.busy = false;
      at_rest_.notify_all();
      return false;
    }
  }
  if (fetches) {
    StartFetch(index);
  } else if (fetched.has_value()) {
    TakeFetched(index, *std::move(fetched));
  } else if (received.has_value()) {
    TakeUpdate(index, received->first, std::move(received->second));
  } else {
    absl::StatusOr<Preconditioned> answer = Compute(index, *request);
    answer.ok() ? request->answer->Complete(*std::move(answer)) : request->answer->Fail(answer.status());
  }
  return true;
}

void LocalFactors::TakeFetched(int64_t index, absl::StatusOr<FactorUpdate> fetched) {
  const absl::Status status = fetched.ok() ? LoadState(index, fetched->bytes) : fetched.status();
  if (!status.ok()) return GiveUp(index, 0, status);
  MutexLock lock(mu_);
  layers_[static_cast<size_t>(index)].sync_state = SyncState::kKnown;
}

void LocalFactors::TakeUpdate(int64_t index, uint64_t step, ReceivedUpdate received) {
  absl::Status why;
  const Verdict verdict = Apply(index, received, why);
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    if (verdict == Verdict::kFetch) {
      received.fetched_since = true;
      layer.received.insert({step, std::move(received)});
      layer.sync_state = SyncState::kFetching;
    } else {
      layer.open.erase(step);
      if (verdict == Verdict::kFailed) layer.failure = {step, why};
    }
  }
  if (verdict == Verdict::kFetch) StartFetch(index);
  if (verdict == Verdict::kFailed) GiveUp(index, step, why);
}

LocalFactors::Verdict LocalFactors::Apply(int64_t index, const ReceivedUpdate& received, absl::Status& why) {
  if (!received.factors.ok()) {
    if (received.fetched_since) return Verdict::kOver;
    why = received.factors.status();
    // The step is over, and the shard's factors contain its update.
    return GetErrorReason(why) == ErrorReason::kStaleStep ? Verdict::kFetch : Verdict::kFailed;
  }
  const FactorUpdate& factors = *received.factors;
  const LayerState* const state = states_[static_cast<size_t>(index)].get();
  const uint64_t version = state == nullptr ? 0 : state->version();
  if (factors.factor_version == version) return Verdict::kOver;
  const bool whole = factors.rows[0] == 0;
  const bool follows =
      whole ? factors.factor_version > version : state != nullptr && factors.factor_version == version + 1;
  if (factors.decision == Decision::kPreconditioned && follows) {
    why = whole ? LoadState(index, factors.bytes) : Replay(index, factors);
    if (why.ok()) return Verdict::kOver;
  }
  if (!received.fetched_since) return Verdict::kFetch;
  if (!why.ok()) return Verdict::kFailed;
  // Factors of an earlier version show that the shard has lost some since it answered. A lone worker goes on with those
  // that are left: no rank has others.
  const bool lost = factors.factor_version > version;
  if (lost && spec_.world_size == 1) return Verdict::kOver;
  const std::string text = absl::StrCat(
      Describe(index), ": the step's factors are of version ", factors.factor_version, ", those fetched of version ",
      version, ", which nothing leads from to it: go back to a checkpoint with all ranks, and join again");
  why = lost ? ReasonedStatus(absl::StatusCode::kDataLoss, ErrorReason::kStateLost, text)
             : absl::FailedPreconditionError(text);
  return Verdict::kFailed;
}

absl::Status LocalFactors::LoadState(int64_t index, const std::string& bytes) {
  std::unique_ptr<LayerState>& state = states_[static_cast<size_t>(index)];
  if (state == nullptr) {
    PRECONDOR_ASSIGN_OR_RETURN(state,
                               methods_.of(index).MakeState(spec_.layers[static_cast<size_t>(index)], *backend_));
  }
  return state->Load(bytes);
}

absl::Status LocalFactors::Replay(int64_t index, const FactorUpdate& received) {
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(index)];
  const auto* next = reinterpret_cast<const uint8_t*>(received.bytes.data());
  const auto upload = [&](int64_t rows, int64_t d) -> absl::StatusOr<DeviceMatrix> {
    std::vector<float> host(static_cast<size_t>(rows * d));
    DecodeElements(DType::kF32, next, 1.0f, absl::MakeSpan(host));
    next += host.size() * ByteSize(DType::kF32);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix vectors, backend_->Allocate(rows, d));
    PRECONDOR_RETURN_IF_ERROR(backend_->Upload(ConstMatrixView(host.data(), rows, d), vectors.view()));
    return vectors;
  };
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix a, upload(received.rows[0], shape.d_in));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix g, upload(received.rows[1], shape.d_out));
  return states_[static_cast<size_t>(index)]->Update({.a = a.view(), .g = g.view()});
}

absl::StatusOr<Preconditioned> LocalFactors::Compute(int64_t index, const Request& request) {
  if (!IsFinite(request.gradient)) {
    return Preconditioned{Decision::kSkip, 0, 0, "the gradient is not finite"};
  }
  LayerState* const state = states_[static_cast<size_t>(index)].get();
  Preconditioned answer;
  if (state != nullptr) answer.factor_version = state->version();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix d, backend_->Allocate(request.gradient.rows, request.gradient.cols));
  PRECONDOR_RETURN_IF_ERROR(backend_->Upload(request.gradient, d.view()));
  const auto identity = [&](const std::string& reason) -> absl::StatusOr<Preconditioned> {
    answer.reason = absl::StrCat("layer \"", spec_.layers[static_cast<size_t>(index)].name, "\" ", reason);
    PRECONDOR_RETURN_IF_ERROR(backend_->Download(d.view(), request.out));
    return answer;
  };
  if (state == nullptr || !state->ready()) return identity("has no factors yet");
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_->Allocate(d.rows(), d.cols()));
  const absl::Status status = state->Precondition(d.view(), u.view());
  // A lack of memory concerns this rank alone; the other ranks may have an answer.
  if (absl::IsResourceExhausted(status)) return status;
  if (!status.ok()) return identity(absl::StrCat(": ", status.message()));
  if (methods_.of(index).needs_global_scale()) {
    PRECONDOR_ASSIGN_OR_RETURN(answer.inner_product, backend_->Dot(d.view(), u.view()));
  }
  PRECONDOR_RETURN_IF_ERROR(backend_->Download(u.view(), request.out));
  if (!IsFinite(request.out)) {
    answer.inner_product = 0;
    return identity(": the preconditioned gradient is not finite");
  }
  answer.decision = Decision::kPreconditioned;
  return answer;
}

FactorUpdateSink::FactorUpdateSink(std::string what, const Limits& limits, Done done)
    : what_(std::move(what)), limits_(limits), done_(std::move(done)) {}

absl::StatusOr<std::array<int64_t, 2>> FactorUpdateSink::RowsOf(absl::Span<const wire::TensorFormat> tensors,
                                                                uint64_t payload_bytes) const {
  std::array<int64_t, 2> rows = {0, 0};
  if (tensors.empty()) {
    if (payload_bytes <= static_cast<uint64_t>(limits_.most_bytes)) return rows;
    return absl::InvalidArgumentError(
        absl::StrCat(what_, ": expected factors of at most ", limits_.most_bytes, " bytes, got ", payload_bytes));
  }
  if (tensors.size() != rows.size()) {
    return absl::InvalidArgumentError(absl::StrCat(what_, ": expected a and g, got ", tensors.size(), " tensors"));
  }
  uint64_t bytes = 0;
  for (size_t side = 0; side < rows.size(); ++side) {
    const wire::TensorFormat& tensor = tensors[side];
    const bool fits = tensor.dtype == DType::kF32 && tensor.scale == 1.0f && tensor.dims.size() == 2 &&
                      tensor.dims[0] <= limits_.most_rows && tensor.dims[1] == limits_.dims[side];
    if (!fits) {
      return absl::InvalidArgumentError(absl::StrCat(what_, ": ", side == 0 ? "a" : "g", ": expected F32 [k, ",
                                                     limits_.dims[side], "] with k up to ", limits_.most_rows, ", got ",
                                                     DTypeName(tensor.dtype), " [", absl::StrJoin(tensor.dims, ", "),
                                                     "] times ", tensor.scale));
    }
    rows[side] = tensor.dims[0];
    bytes += static_cast<uint64_t>(tensor.dims[0] * tensor.dims[1]) * ByteSize(DType::kF32);
  }
  if (payload_bytes == bytes) return rows;
  return absl::InvalidArgumentError(absl::StrCat(what_, ": expected ", bytes, " bytes, got ", payload_bytes));
}

absl::Status FactorUpdateSink::Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) {
  PRECONDOR_ASSIGN_OR_RETURN(const auto rows, RowsOf(tensors, payload_bytes));
  MutexLock lock(mu_);
  begun_ = true;
  expected_bytes_ = payload_bytes;
  update_.rows = rows;
  update_.bytes.clear();
  update_.bytes.reserve(payload_bytes);
  return absl::OkStatus();
}

absl::Status FactorUpdateSink::Append(uint64_t offset, const wire::ReceivedBytes& chunk) {
  MutexLock lock(mu_);
  if (over_ || (!begun_ && offset > 0)) return absl::OkStatus();  // as in PreconditionFuture::State::Append
  const uint64_t have = update_.bytes.size();
  if (!begun_ || offset != have || chunk.size() > expected_bytes_ - have) {
    return absl::InvalidArgumentError(absl::StrCat(what_, ": expected bytes from ", have, " to at most ",
                                                   expected_bytes_, ", got ", chunk.size(), " from ", offset));
  }
  for (const absl::string_view piece : chunk.pieces()) update_.bytes.append(piece.data(), piece.size());
  return absl::OkStatus();
}

bool FactorUpdateSink::HasAllBytes() const {
  MutexLock lock(mu_);
  return begun_ && update_.bytes.size() == expected_bytes_;
}

void FactorUpdateSink::Restart() {
  MutexLock lock(mu_);
  if (over_) return;
  begun_ = false;
  update_.bytes.clear();
}

bool FactorUpdateSink::Complete(Preconditioned outcome) {
  FactorUpdate update;
  {
    MutexLock lock(mu_);
    if (std::exchange(over_, true)) return false;
    update = std::move(update_);
  }
  update.decision = outcome.decision;
  update.factor_version = outcome.factor_version;
  update.reason = std::move(outcome.reason);
  done_(std::move(update));
  return true;
}

bool FactorUpdateSink::Fail(absl::Status status) {
  {
    MutexLock lock(mu_);
    if (std::exchange(over_, true)) return false;
  }
  done_(std::move(status));
  return true;
}

bool FactorUpdateSink::ready() const {
  MutexLock lock(mu_);
  return over_;
}

}  // namespace precondor

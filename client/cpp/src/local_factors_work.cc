// SPDX-License-Identifier: Apache-2.0
// Work of LocalFactors' threads: handles one layer's fetched factors, updates and requests, in order.
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/local_factors.h"
#include "kernels/base/dtype.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

bool IsFinite(ConstMatrixView x) {
  for (int64_t row = 0; row < x.rows; ++row) {
    if (!AllFinite(absl::MakeConstSpan(x.row(row), static_cast<size_t>(x.cols)))) return false;
  }
  return true;
}

}  // namespace

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
  bool renew = false;
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    const bool known = layer.sync_state == SyncState::kKnown;
    const bool due = known && !layer.requests.empty() && !WaitsForRenewal(layer, layer.requests.front().step);
    const bool told = known && !layer.open.empty() && !WaitsForRenewal(layer, *layer.open.begin());
    if (layer.fetched.has_value()) {
      fetched = std::exchange(layer.fetched, std::nullopt);
    } else if (due && (layer.open.empty() || layer.requests.front().step < *layer.open.begin())) {
      request = std::move(layer.requests.front());
      layer.requests.pop_front();
    } else if (told && !layer.received.empty() && layer.received.begin()->first == *layer.open.begin()) {
      auto first = layer.received.extract(layer.received.begin());
      received.emplace(first.key(), std::move(first.mapped()));
    } else if (known && (layer.release || layer.renew_from.has_value()) && !due && !told) {
      renew = layer.renew_from.has_value();
      layer.sync_state = renew ? SyncState::kFetching : SyncState::kUnknown;
      layer.renew_from.reset();
      layer.release = false;
      layer.version = 0;
    } else {
      layer.busy = false;
      at_rest_.notify_all();
      return false;
    }
  }
  if (fetched.has_value()) {
    TakeFetched(index, *std::move(fetched));
  } else if (received.has_value()) {
    TakeUpdate(index, received->first, std::move(received->second));
  } else if (request.has_value()) {
    absl::StatusOr<Preconditioned> answer = Compute(index, *request);
    answer.ok() ? request->answer->Complete(*std::move(answer)) : request->answer->Fail(answer.status());
  } else {
    states_[static_cast<size_t>(index)] = nullptr;
    if (renew) StartFetch(index);
  }
  return true;
}

void LocalFactors::TakeFetched(int64_t index, absl::StatusOr<FactorUpdate> fetched) {
  absl::Status status = fetched.status();
  if (status.ok() && fetched->decision == Decision::kIdentity) {
    states_[static_cast<size_t>(index)] = nullptr;
  } else if (status.ok()) {
    status = LoadState(index, fetched->bytes);
  }
  if (!status.ok()) return GiveUp(index, 0, status);
  const LayerState* const state = states_[static_cast<size_t>(index)].get();
  MutexLock lock(mu_);
  layers_[static_cast<size_t>(index)].sync_state = SyncState::kKnown;
  layers_[static_cast<size_t>(index)].version = state == nullptr ? 0 : state->version();
}

void LocalFactors::TakeUpdate(int64_t index, uint64_t step, ReceivedUpdate received) {
  absl::Status why;
  const Verdict verdict = Apply(index, received, why);
  const LayerState* const state = states_[static_cast<size_t>(index)].get();
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    layer.version = state == nullptr ? 0 : state->version();
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
  if (factors.decision == Decision::kPreconditioned && factors.factor_version > version) {
    if (factors.rows[0] == 0) {
      why = LoadState(index, factors.bytes);
    } else if (state != nullptr && factors.factor_version == version + 1) {
      why = Replay(index, factors);
    } else {
      why = absl::FailedPreconditionError("they do not follow");
    }
    if (why.ok()) return Verdict::kOver;
  }
  if (!received.fetched_since) return Verdict::kFetch;
  why = absl::FailedPreconditionError(absl::StrCat(
      Describe(index), ": the step's factors are of version ", factors.factor_version, ", those fetched of version ",
      version, ", which nothing leads from to it: go back to a checkpoint with all ranks, and join again"));
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

}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/local_factors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

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

uint64_t LocalFactors::VersionOf(int64_t layer) const {
  MutexLock lock(mu_);
  return layers_[static_cast<size_t>(layer)].version;
}

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

void LocalFactors::NeedSecondOrder(int64_t index, uint64_t since) {
  if (!methods_.of(index).needs_statistics()) return;
  {
    MutexLock lock(mu_);
    Layer& layer = layers_[static_cast<size_t>(index)];
    if (!failed_.ok()) return;
    const bool other = std::exchange(layer.since, since) != since;
    layer.release = false;
    if (layer.sync_state != SyncState::kUnknown) {
      if (other) layer.renew_from = since;
      if (other) Wake(index);
      return;
    }
    layer.renew_from.reset();
    layer.sync_state = SyncState::kFetching;
  }
  StartFetch(index);
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

void LocalFactors::Precondition(uint64_t step, uint64_t since, int64_t layer, ConstMatrixView gradient, MatrixView out,
                                const std::shared_ptr<PreconditionFuture::State>& answer) {
  NeedSecondOrder(layer, since);
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
}

void LocalFactors::Release(int64_t layer) {
  if (!methods_.of(layer).needs_statistics()) return;
  MutexLock lock(mu_);
  layers_[static_cast<size_t>(layer)].release = true;
  Wake(layer);
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

}  // namespace precondor

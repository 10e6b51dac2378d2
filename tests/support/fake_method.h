// SPDX-License-Identifier: Apache-2.0
// A method whose answers a test can predict: after v updates U = (v + 1) D. It writes down what it was given.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

// One factor update as the method saw it; `version` is that before the update.
struct FakeUpdate {
  std::string layer;
  uint64_t version = 0;
  int64_t k = 0;
  std::vector<float> a;  // [k, d_in]
  std::vector<float> g;  // [k, d_out]
};

// Shared by all states of a test; thread-safe.
class FakeMethodLog {
 public:
  void Add(FakeUpdate update) {
    MutexLock lock(mu_);
    updates_.push_back(std::move(update));
  }
  std::vector<FakeUpdate> updates() const {
    MutexLock lock(mu_);
    return updates_;
  }
  // Called whenever a state is made. Set it before the shard has a session.
  std::function<void()> on_make_state = [] {};

  // Switches that states read at each call.
  void set_fail_updates(bool fail) {
    MutexLock lock(mu_);
    fail_updates_ = fail;
  }
  bool fail_updates() const {
    MutexLock lock(mu_);
    return fail_updates_;
  }
  void set_poison_results(bool poison) {
    MutexLock lock(mu_);
    poison_results_ = poison;
  }
  bool poison_results() const {
    MutexLock lock(mu_);
    return poison_results_;
  }

 private:
  mutable Mutex mu_;
  std::vector<FakeUpdate> updates_ ABSL_GUARDED_BY(mu_);
  bool fail_updates_ ABSL_GUARDED_BY(mu_) = false;
  bool poison_results_ ABSL_GUARDED_BY(mu_) = false;
};

class FakeLayerState final : public LayerState {
 public:
  FakeLayerState(LayerSpec layer, Backend& backend, std::shared_ptr<FakeMethodLog> log, bool ready)
      : layer_(std::move(layer)), backend_(backend), log_(std::move(log)), always_ready_(ready) {}

  absl::Status Update(const LayerStatistics& statistics) override {
    if (log_->fail_updates()) return absl::FailedPreconditionError("told to fail");
    FakeUpdate update{.layer = layer_.name, .version = version_, .k = statistics.a.rows, .a = {}, .g = {}};
    update.a.resize(statistics.a.size());
    update.g.resize(statistics.g.size());
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Download(statistics.a, MatrixView(update.a.data(), statistics.a.rows, statistics.a.cols)));
    PRECONDOR_RETURN_IF_ERROR(
        backend_.Download(statistics.g, MatrixView(update.g.data(), statistics.g.rows, statistics.g.cols)));
    log_->Add(std::move(update));
    ++version_;
    return absl::OkStatus();
  }
  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    const double poison = log_->poison_results() ? std::numeric_limits<double>::infinity() : 1.0;
    return backend_.Axpby(poison * static_cast<double>(version_ + 1), d, 0, u);
  }
  absl::StatusOr<std::string> Save() const override {
    StateWriter out("fake");
    out.Integer(version_);
    return out.Finish();
  }
  absl::Status Load(absl::string_view bytes) override {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin("fake"));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    version_ = version;
    return absl::OkStatus();
  }
  bool ready() const override { return always_ready_ || version_ > 0; }
  uint64_t version() const override { return version_; }
  int64_t bytes() const override { return 0; }
  Summary summary() const override { return {}; }

 private:
  const LayerSpec layer_;
  Backend& backend_;
  const std::shared_ptr<FakeMethodLog> log_;
  const bool always_ready_;
  uint64_t version_ = 0;
};

class FakeMethod final : public Method {
 public:
  FakeMethod(std::shared_ptr<FakeMethodLog> log, bool needs_statistics, bool takes_covariances = false)
      : log_(std::move(log)) {
    if (!needs_statistics) traits_.statistics = StatisticsForm::kNone;
    if (needs_statistics && takes_covariances) traits_.statistics = StatisticsForm::kCovariances;
  }
  const MethodTraits& traits() const override { return traits_; }
  int64_t StateBytes(const LayerSpec& layer) const override { return 4 * (layer.d_in + layer.d_out); }
  int64_t ScratchBytes(const LayerSpec&, int64_t) const override { return 128; }
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    return static_cast<double>(layer.d_in) * static_cast<double>(layer.d_out);
  }
  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    log_->on_make_state();
    return std::make_unique<FakeLayerState>(layer, backend, log_, !needs_statistics());
  }

 private:
  const std::shared_ptr<FakeMethodLog> log_;
  MethodTraits traits_ = {
      .name = "fake", .statistics = StatisticsForm::kVectors, .worker_factors = WorkerFactors::kReplayed};
};

}  // namespace precondor

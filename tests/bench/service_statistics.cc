// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/service_statistics.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "client/cpp/src/control.h"
#include "client/cpp/tools/perf_training.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr double kMilli = 1e3;

int64_t FactorElements(const std::vector<LayerSpec>& layers) {
  int64_t elements = 0;
  for (const LayerSpec& layer : layers) elements += layer.d_in + layer.d_out;
  return elements;
}

int64_t DenseElements(const std::vector<LayerSpec>& layers) {
  int64_t elements = 0;
  for (const LayerSpec& layer : layers) elements += layer.d_in * layer.d_in + layer.d_out * layer.d_out;
  return elements;
}

int64_t Widest(const std::vector<LayerSpec>& layers) {
  int64_t widest = 0;
  for (const LayerSpec& layer : layers) widest = std::max({widest, layer.d_in, layer.d_out});
  return widest;
}

SessionSpec Spec(const PerfOptions& options, const std::vector<LayerSpec>& layers, const std::string& method,
                 int64_t factor_rank) {
  SessionSpec spec;
  spec.name = absl::StrCat("perf-", method, "-", factor_rank);
  spec.world_size = static_cast<int32_t>(options.workers);
  spec.exchange = ExchangeMode::kDelegate;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.inv_freq = 1;
  spec.warmup_steps = 0;
  spec.method.name = method;
  if (method == "mkor") {
    spec.method.options["representation"] = std::string("LOW_RANK");
    spec.method.options["rank"] = static_cast<double>(factor_rank);
  }
  spec.layers = layers;
  return spec;
}

// The server's counters of a session, summed over layers.
struct Counters {
  double update_seconds = 0;
  int64_t state_bytes = 0;
};

absl::StatusOr<Counters> ReadCounters(ControlClient& control, const std::string& session) {
  v1::GetLayerStatsRequest request;
  request.set_session(session);
  Canceller canceller;
  PRECONDOR_ASSIGN_OR_RETURN(const auto response, control.Call<v1::GetLayerStatsResponse>(request, canceller));
  Counters counters;
  for (const v1::LayerStats& layer : response.layers()) {
    counters.state_bytes += static_cast<int64_t>(layer.state_bytes());
    counters.update_seconds += layer.update_seconds() * static_cast<double>(layer.factor_version());
  }
  return counters;
}

// A session whose workers step together.
class Run {
 public:
  Run(const PerfOptions& options, const std::vector<LayerSpec>& layers, const std::string& method, int64_t factor_rank,
      const PerfServer& server)
      : spec_(Spec(options, layers, method, factor_rank)),
        address_(server.address()),
        control_(server.address(), absl::Seconds(30), options.security),
        widest_(static_cast<size_t>(Widest(layers))),
        noise_(std::max(size_t{1} << 20, 4 * widest_)) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    for (float& value : noise_) value = normal(rng);
  }

  absl::Status OpenSession() {
    ClientOptions options;
    options.coordinator = address_;
    PRECONDOR_ASSIGN_OR_RETURN(client_, Client::Connect(options));
    PRECONDOR_RETURN_IF_ERROR(client_->OpenSession(spec_).status());
    workers_.resize(static_cast<size_t>(spec_.world_size));
    return ForEachRank(workers_.size(), [this](uint32_t rank) -> absl::Status {
      PRECONDOR_ASSIGN_OR_RETURN(workers_[rank], client_->Join(spec_.name, {rank, 0}));
      return absl::OkStatus();
    });
  }

  absl::Status Close() {
    workers_.clear();
    return client_->CloseSession(spec_.name).status();
  }

  // Runs a step and returns its seconds: the statistics of every worker are sent, sealed and applied. The shard answers
  // a layer's abstaining gradient only after it has applied the statistics of the step, so the answers mark the end.
  absl::StatusOr<double> Step() {
    const absl::Time start = MonotonicNow();
    PRECONDOR_RETURN_IF_ERROR(ForEachRank(workers_.size(), [this](uint32_t rank) -> absl::Status {
      PRECONDOR_RETURN_IF_ERROR(Send(rank));
      return AwaitApplied(*workers_[rank]);
    }));
    const double seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
    PRECONDOR_RETURN_IF_ERROR(ForEachRank(workers_.size(), [this](uint32_t rank) {
      return workers_[rank]->ReportStep(step_, 1.0, 1, true, 0.1).Wait().status();
    }));
    ++step_;
    return seconds;
  }

  absl::StatusOr<Counters> ReadCounters() { return precondor::ReadCounters(control_, spec_.name); }

  // Precondition: the session is open. All workers send the same number of bytes.
  int64_t sent_bytes() const {
    return static_cast<int64_t>(workers_.size()) * workers_[0]->status().traffic.statistics_bytes;
  }

 private:
  absl::Status Send(uint32_t rank) {
    for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
      const LayerSpec& shape = spec_.layers[layer];
      PRECONDOR_RETURN_IF_ERROR(workers_[rank]->SendStatistics(
          step_, static_cast<int64_t>(layer), ConstMatrixView(Vector(rank, layer), 1, shape.d_in),
          ConstMatrixView(Vector(rank, layer + 1), 1, shape.d_out), 1));
    }
    return absl::OkStatus();
  }

  // Returns a place in the noise that differs by rank, layer and step, because equal vectors would give factors of rank
  // 1.
  const float* Vector(uint32_t rank, size_t layer) const {
    const uint64_t place = (step_ * spec_.layers.size() + layer) * static_cast<uint64_t>(spec_.world_size) + rank;
    return noise_.data() + place * 7919 % (noise_.size() - widest_);
  }

  absl::Status AwaitApplied(Worker& worker) {
    std::vector<PreconditionFuture> futures;
    for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
      const int64_t index = static_cast<int64_t>(layer);
      if (worker.SendsGradient(index)) futures.push_back(worker.AbstainGradient(step_, index));
    }
    for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
    return worker.Flush();
  }

  const SessionSpec spec_;
  const std::string address_;
  ControlClient control_;
  const size_t widest_;
  std::vector<float> noise_;
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<Worker>> workers_;
  uint64_t step_ = 0;
};

struct Measured {
  std::vector<double> seconds;
  std::vector<double> kernel_seconds;  // of each step: time in kernels, divided by the server's threads
  std::vector<double> other_seconds;   // of each step: the rest of its time
  int64_t resident_bytes = 0;
  int64_t state_bytes = 0;
  int64_t payload_bytes = 0;  // of one worker in one step
};

absl::StatusOr<Measured> Measure(const PerfOptions& options, const std::vector<LayerSpec>& layers,
                                 const std::string& method, int64_t factor_rank, const PerfServer& server) {
  Run run(options, layers, method, factor_rank, server);
  PRECONDOR_RETURN_IF_ERROR(run.OpenSession());
  for (int64_t i = 0; i < options.warmup; ++i) PRECONDOR_RETURN_IF_ERROR(run.Step().status());
  Measured measured;
  PRECONDOR_ASSIGN_OR_RETURN(Counters before, run.ReadCounters());
  for (int64_t i = 0; i < options.steps; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const double seconds, run.Step());
    PRECONDOR_ASSIGN_OR_RETURN(const Counters after, run.ReadCounters());
    const double kernels = (after.update_seconds - before.update_seconds) / static_cast<double>(options.threads);
    measured.seconds.push_back(seconds);
    measured.kernel_seconds.push_back(kernels);
    measured.other_seconds.push_back(seconds - kernels);
    before = after;
  }
  measured.resident_bytes = server.resident_bytes();
  measured.state_bytes = before.state_bytes;
  measured.payload_bytes = run.sent_bytes() / options.workers / (options.warmup + options.steps);
  PRECONDOR_RETURN_IF_ERROR(run.Close());
  return measured;
}

}  // namespace

absl::StatusOr<std::vector<PerfRow>> MeasureStatistics(const PerfOptions& options, const PerfServer& server) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<LayerSpec> layers, PerfLayers(options));
  const int64_t idle_bytes = server.resident_bytes();
  // Measures the run whose memory is reported first, while the server has held nothing else.
  PRECONDOR_ASSIGN_OR_RETURN(const Measured mkor, Measure(options, layers, "mkor", options.rank, server));
  PRECONDOR_ASSIGN_OR_RETURN(const Measured least, Measure(options, layers, "mkor", 1, server));
  PRECONDOR_ASSIGN_OR_RETURN(const Measured transport, Measure(options, layers, "identity", 0, server));
  const double step = Percentile(mkor.seconds, 0.5) * kMilli;
  const double kernels = Percentile(mkor.kernel_seconds, 0.5) * kMilli;
  const double other = Percentile(mkor.other_seconds, 0.5) * kMilli;
  const double least_step = Percentile(least.seconds, 0.5) * kMilli;
  const double least_other = Percentile(least.other_seconds, 0.5) * kMilli;
  const double transport_step = Percentile(transport.seconds, 0.5) * kMilli;
  constexpr double kTargetMs = 20;
  std::vector<PerfRow> rows = {
      {"statistics/step_p50", step, "ms"},
      {"statistics/step_p99", Percentile(mkor.seconds, 0.99) * kMilli, "ms"},
      {"statistics/kernels_over_threads_p50", kernels, "ms", step, kernels / step},
      {"statistics/not_kernels_p50", other, "ms", step, other / step, kTargetMs,
       // A negative value means that other work on the machine delayed the threads, so the measurement is invalid.
       other >= 0 && other < kTargetMs},
      {"statistics/transport_acknowledged", transport_step, "ms", step, transport_step / step},
      {"statistics/rank1_step_p50", least_step, "ms", step, least_step / step},
      {"statistics/rank1_not_kernels_p50", least_other, "ms", step, least_other / step},
      {"statistics/payload_per_worker", static_cast<double>(mkor.payload_bytes) / 1e6, "MB"},
  };
  if (mkor.resident_bytes > 0) {
    const double vectors = static_cast<double>(FactorElements(layers) * options.rank * 4) / 1e6;
    const double state = static_cast<double>(mkor.state_bytes) / 1e6;
    // The vectors (f16) of every worker in one step, twice: as the transport received them, and as kept until they are
    // reduced.
    const double staging = 2 * static_cast<double>(options.workers * mkor.payload_bytes) / 1e6;
    const double resident = static_cast<double>(mkor.resident_bytes - idle_bytes) / 1e6;
    const double dense = static_cast<double>(DenseElements(layers) * 4) / 1e6;
    constexpr double kTargetRatio = 1.1;
    const auto against = [&](const char* name, double computed) {
      const double target = kTargetRatio * computed;
      rows.push_back({name, resident, "MB", computed, resident / computed, target, resident <= target});
    };
    against("memory/resident_to_vectors_and_staging", vectors + staging);
    against("memory/resident_to_state_and_staging", state + staging);
    rows.push_back({"memory/staging", staging, "MB"});
    rows.push_back({"memory/idle", static_cast<double>(idle_bytes) / 1e6, "MB"});
    rows.push_back({"memory/state", state, "MB", dense, state / dense});
  }
  return rows;
}

}  // namespace precondor

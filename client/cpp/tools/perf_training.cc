// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf_training.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_render.h"
#include "client/cpp/tools/perf.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr int32_t kInvFreq = 10;

// Returns whether a window ends. It ends with a whole cycle, after a third of the requested seconds or steps.
bool WindowEnds(const PerfOptions& options, int64_t cycle, int64_t steps, double seconds) {
  constexpr auto kParts = static_cast<int64_t>(SteadyWindows::kCompared);
  if (steps == 0 || steps % cycle != 0) return false;
  if (options.seconds > 0) return seconds * static_cast<double>(kParts) >= static_cast<double>(options.seconds);
  return steps >= options.steps / kParts;
}

}  // namespace

SessionSpec TrainingSpec(const PerfOptions& options, const std::vector<LayerSpec>& layers, const std::string& method,
                         ExchangeMode exchange) {
  SessionSpec spec;
  spec.name = absl::StrCat("perf-training-", method, "-", layers.size(), "-", options.workers);
  spec.world_size = static_cast<int32_t>(options.workers);
  spec.exchange = exchange;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.inv_freq = kInvFreq;
  spec.warmup_steps = 0;
  spec.method.name = method;
  if (method == "mkor") {
    spec.method.options["representation"] = std::string("LOW_RANK");
    spec.method.options["rank"] = static_cast<double>(options.rank);
  }
  spec.layers = layers;
  return spec;
}

TrainingSteps::TrainingSteps(SessionSpec spec)
    : spec_(std::move(spec)), workers_(static_cast<size_t>(spec_.world_size)) {
  for (uint32_t rank = 0; rank < workers_.size(); ++rank) data_.push_back(MakeData(spec_, rank));
}

TrainingSteps::RankData TrainingSteps::MakeData(const SessionSpec& spec, uint32_t rank) {
  RankData data;
  int64_t widest = 0;
  for (size_t place = 0; place < spec.layers.size(); ++place) {
    const LayerSpec& layer = spec.layers[place];
    const bool sends = spec.exchange != ExchangeMode::kDelegate ||
                       DelegateRank(spec, static_cast<int64_t>(place)) == static_cast<int32_t>(rank);
    std::vector<float> gradient(sends ? static_cast<size_t>(layer.d_out * layer.d_in) : 0);
    for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>((i * 7919 + rank) % 1009) - 504;
    data.answers.push_back(gradient);
    data.gradients.push_back(std::move(gradient));
    widest = std::max({widest, layer.d_in, layer.d_out});
  }
  for (int64_t i = 0; i < 4 * widest; ++i) data.vectors.push_back(static_cast<float>((i * i + rank) % 211) - 105);
  return data;
}

absl::StatusOr<std::unique_ptr<TrainingSteps>> TrainingSteps::Open(const SessionSpec& spec, const PerfServer& server) {
  std::unique_ptr<TrainingSteps> run(new TrainingSteps(spec));
  ClientOptions options;
  options.coordinator = server.address();
  PRECONDOR_ASSIGN_OR_RETURN(run->client_, Client::Connect(options));
  PRECONDOR_RETURN_IF_ERROR(run->client_->OpenSession(spec).status());
  PRECONDOR_RETURN_IF_ERROR(ForEachRank(run->workers_.size(), [&run](uint32_t rank) -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(run->workers_[rank], run->client_->Join(run->spec_.name, {rank, 0}));
    return absl::OkStatus();
  }));
  return run;
}

absl::Status TrainingSteps::Run(uint64_t steps) {
  const uint64_t from = std::exchange(next_, next_ + steps);
  return ForEachRank(workers_.size(), [&](uint32_t rank) {
    for (uint64_t step = from; step < from + steps; ++step) PRECONDOR_RETURN_IF_ERROR(RunStep(rank, step));
    return absl::OkStatus();
  });
}

absl::StatusOr<double> TrainingSteps::Step() {
  const absl::Time start = MonotonicNow();
  PRECONDOR_RETURN_IF_ERROR(Run(1));
  return absl::ToDoubleSeconds(MonotonicNow() - start);
}

int64_t TrainingSteps::sent_bytes() const {
  int64_t bytes = 0;
  for (const std::unique_ptr<Worker>& worker : workers_) {
    const Traffic traffic = worker->status().traffic;
    bytes += traffic.statistics_bytes + traffic.gradient_bytes;
  }
  return bytes;
}

absl::Status TrainingSteps::Close() {
  workers_.clear();
  return client_->CloseSession(spec_.name).status();
}

absl::Status TrainingSteps::RunStep(uint32_t rank, uint64_t step) {
  Worker& worker = *workers_[rank];
  RankData& data = data_[rank];
  std::vector<PreconditionFuture> futures;
  for (size_t layer = 0; layer < data.gradients.size(); ++layer) {
    const LayerSpec& shape = spec_.layers[layer];
    const auto index = static_cast<int64_t>(layer);
    // The vectors differ from step to step, because equal vectors would give factors of rank 1.
    const float* const vectors = data.vectors.data() + step * 31 % (data.vectors.size() / 2);
    if (worker.NeedsStatistics(step, index)) {
      PRECONDOR_RETURN_IF_ERROR(worker.SendStatistics(step, index, ConstMatrixView(vectors, 1, shape.d_in),
                                                      ConstMatrixView(vectors + 1, 1, shape.d_out), 1));
    }
    if (!worker.SendsGradient(index)) continue;
    futures.push_back(worker.Precondition(step, index,
                                          {ConstMatrixView(data.gradients[layer].data(), shape.d_out, shape.d_in),
                                           MatrixView(data.answers[layer].data(), shape.d_out, shape.d_in)},
                                          1));
  }
  for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
  return worker.ReportStep(step, 1.0, 1, true, 0.1).Wait().status();
}

double SteadyWindows::spread() const {
  if (seconds_.size() < kCompared) return 1;
  const auto [least, most] = std::minmax_element(seconds_.end() - kCompared, seconds_.end());
  return (*most - *least) / *least;
}

absl::StatusOr<std::vector<SweepRow>> MeasureSweep(const PerfOptions& options, const PerfServer& server) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<LayerSpec> layers, PerfLayers(options));
  std::vector<SweepRow> rows;
  for (const int64_t workers : options.sweep) {
    PerfOptions one = options;
    one.workers = workers;
    const SessionSpec spec = TrainingSpec(one, layers, one.method, one.exchange);
    PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<TrainingSteps> run, TrainingSteps::Open(spec, server));
    for (int64_t i = 0; i < options.warmup || i % run->cycle() != 0; ++i) {
      PRECONDOR_RETURN_IF_ERROR(run->Step().status());
    }
    const int64_t sent_before = run->sent_bytes();
    SteadyWindows windows;
    std::vector<double> seconds;
    std::vector<size_t> begins;  // index in `seconds` of the first step of each window
    while (!windows.done()) {
      begins.push_back(seconds.size());
      double total = 0;
      for (int64_t steps = 0; !WindowEnds(options, run->cycle(), steps, total); ++steps) {
        PRECONDOR_ASSIGN_OR_RETURN(const double step, run->Step());
        seconds.push_back(step);
        total += step;
      }
      windows.Add(total / static_cast<double>(seconds.size() - begins.back()));
    }
    const double step_bytes =
        static_cast<double>(run->sent_bytes() - sent_before) / static_cast<double>(seconds.size());
    PRECONDOR_RETURN_IF_ERROR(run->Close());
    const size_t compared = begins[begins.size() - SteadyWindows::kCompared];
    seconds.erase(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(compared));
    const double rate = static_cast<double>(seconds.size()) / std::accumulate(seconds.begin(), seconds.end(), 0.0);
    rows.push_back({.workers = workers,
                    .step_p50_ms = Percentile(seconds, 0.5) * 1e3,
                    .step_p99_ms = Percentile(seconds, 0.99) * 1e3,
                    .steps_per_second = rate,
                    .received_mb_per_second = rate * step_bytes / 1e6,
                    .windows = windows.count(),
                    .spread = windows.spread(),
                    .steady = windows.steady()});
  }
  return rows;
}

std::string SweepTable(const std::vector<SweepRow>& rows) {
  std::vector<std::vector<std::string>> cells = {
      {"WORKERS", "STEP_P50_MS", "STEP_P99_MS", "STEPS_PER_S", "RECEIVED_MB_PER_S", "WINDOWS", "SPREAD_%", "STEADY"}};
  for (const SweepRow& row : rows) {
    cells.push_back({absl::StrCat(row.workers), absl::StrFormat("%.4g", row.step_p50_ms),
                     absl::StrFormat("%.4g", row.step_p99_ms), absl::StrFormat("%.4g", row.steps_per_second),
                     absl::StrFormat("%.4g", row.received_mb_per_second), absl::StrCat(row.windows),
                     absl::StrFormat("%.1f", 100 * row.spread), row.steady ? "yes" : "NO"});
  }
  std::string table = FormatTable(cells);
  for (const SweepRow& row : rows) {
    if (row.steady) continue;
    absl::StrAppendFormat(&table,
                          "%d workers: not steady: the last %d of %d windows differ by %.1f%%, more than 10%%\n",
                          row.workers, SteadyWindows::kCompared, row.windows, 100 * row.spread);
  }
  return table;
}

std::string SweepJson(const std::vector<SweepRow>& rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const SweepRow& row : rows) {
    list.push_back({{"workers", row.workers},
                    {"step_p50_ms", row.step_p50_ms},
                    {"step_p99_ms", row.step_p99_ms},
                    {"steps_per_second", row.steps_per_second},
                    {"received_mb_per_second", row.received_mb_per_second},
                    {"windows", row.windows},
                    {"spread", row.spread},
                    {"steady", row.steady}});
  }
  return nlohmann::json{{"sweep", list}}.dump(1) + "\n";
}

}  // namespace precondor

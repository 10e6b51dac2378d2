// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf_sweep.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_render.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_training.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Returns whether a window ends. It ends with a whole cycle, after a third of the requested seconds or steps.
bool WindowEnds(const PerfOptions& options, int64_t cycle, int64_t steps, double seconds) {
  constexpr auto kParts = static_cast<int64_t>(SteadyWindows::kCompared);
  if (steps == 0 || steps % cycle != 0) return false;
  if (options.seconds > 0) return seconds * static_cast<double>(kParts) >= static_cast<double>(options.seconds);
  return steps >= options.steps / kParts;
}

}  // namespace

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

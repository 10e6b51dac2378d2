// SPDX-License-Identifier: Apache-2.0
// precondor-digits: trains on real data through the service and shows what preconditioning is worth.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cpp/examples/digits_data.h"
#include "client/cpp/examples/launcher.h"
#include "client/cpp/examples/options.h"
#include "client/cpp/examples/progress.h"
#include "client/cpp/examples/rate_search.h"
#include "client/cpp/examples/report.h"
#include "client/cpp/examples/svg_chart.h"
#include "client/cpp/examples/worker_role.h"
#include "kernels/base/blas_core.h"
#include "kernels/base/status_macros.h"

namespace precondor::digits {
namespace {

std::vector<uint64_t> SeedsUpTo(int64_t count) {
  std::vector<uint64_t> seeds;
  for (int64_t seed = 1; seed <= count; ++seed) seeds.push_back(static_cast<uint64_t>(seed));
  return seeds;
}

std::vector<Row> PlanRows(const Options& options) {
  std::vector<Row> rows;
  for (const Task& task : options.tasks) {
    for (const std::string& optimizer : options.optimizers) {
      for (const MethodVariant& method : options.methods) {
        // One row for a method that comes with a base optimizer.
        if (!method.optimizer.empty() && optimizer != options.optimizers.front()) continue;
        const std::string& base = method.optimizer.empty() ? optimizer : method.optimizer;
        Row row;
        row.run = Run{task, method, base, options.exchange, options.workers, 0, options.learning_rates.front()};
        row.run.on_shard_loss = options.on_shard_loss;
        if (options.steps > 0) row.run.task.steps = options.steps;
        row.seeds = SeedsUpTo(options.seeds);
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

absl::Status SearchRates(const RateSearch& search, const DigitsData& data, std::vector<Row>& rows) {
  // A row that falls back takes the rate of its method without: what is compared is the fallback alone.
  std::vector<Run> runs;
  std::vector<size_t> run_of_row;
  for (const Row& row : rows) {
    const auto same = std::find_if(runs.begin(), runs.end(), [&](const Run& run) {
      return run.task.name == row.run.task.name && run.optimizer == row.run.optimizer &&
             run.method.config == row.run.method.config && run.method.kind == row.run.method.kind;
    });
    run_of_row.push_back(static_cast<size_t>(same - runs.begin()));
    if (same == runs.end()) runs.push_back(row.run);
  }
  Progress progress("learning rates");
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<RateChoice> choices,
                             ChooseRates(runs, search, data, [&](int64_t done, int64_t planned) {
                               progress.Update(done, planned, absl::StrCat(done, " of ", planned, " runs"));
                             }));
  for (size_t i = 0; i < rows.size(); ++i) rows[i].run.learning_rate = choices[run_of_row[i]].learning_rate;
  return absl::OkStatus();
}

// All runs of all rows, row by row.
std::vector<Run> RunsOf(const std::vector<Row>& rows) {
  std::vector<Run> runs;
  for (const Row& row : rows) {
    for (const uint64_t seed : row.seeds) {
      runs.push_back(row.run);
      runs.back().seed = seed;
    }
  }
  return runs;
}

absl::StatusOr<std::vector<RunResult>> TrainAllInProcess(const std::vector<Run>& runs, int threads,
                                                         const DigitsData& data) {
  std::vector<RunResult> results(runs.size());
  PRECONDOR_RETURN_IF_ERROR(ParallelFor(static_cast<int64_t>(runs.size()), threads, [&](int64_t i) {
    PRECONDOR_ASSIGN_OR_RETURN(results[static_cast<size_t>(i)], TrainInProcess(runs[static_cast<size_t>(i)], data));
    return absl::OkStatus();
  }));
  return results;
}

absl::StatusOr<std::vector<RunResult>> TrainThroughService(const Options& options, std::vector<Run> runs) {
  Job job;
  job.data_path = options.data_path;
  job.coordinator = options.coordinator;
  job.session_prefix = absl::StrCat("digits-", getpid());
  job.workers = options.workers;
  int64_t total = 0;
  std::vector<int64_t> steps_before;
  for (const Run& run : runs) {
    for (const LayerSpec& layer : MakeSessionSpec(run, "size").layers) {
      job.reducer_elements = std::max(job.reducer_elements, layer.d_out * layer.d_in);
    }
    steps_before.push_back(total);
    total += run.task.steps;
  }
  job.runs = std::move(runs);
  job.worker_restarts = options.worker_restarts;
  job.checkpoint_dir = options.checkpoint_dir;
  Progress progress("training");
  return LaunchWorkers(job, [&](const WorkerReport& report) {
    const Run& run = job.runs[static_cast<size_t>(report.run)];
    progress.Update(steps_before[static_cast<size_t>(report.run)] + report.point.step, total,
                    absl::StrFormat("%s, %s + %s, seed %d, loss %.4f", run.task.name, run.method.name, run.optimizer,
                                    run.seed, CriterionLoss(run.task, report.point)));
  });
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  return file ? absl::OkStatus() : absl::UnknownError(absl::StrCat("cannot write ", path));
}

absl::Status RunAll(const Options& options) {
  UseSingleThreadedBlas();
  PRECONDOR_ASSIGN_OR_RETURN(const DigitsData data, LoadDigits(options.data_path));
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<Row> rows = PlanRows(options);
  ReportContext context;
  context.in_process = options.in_process;
  context.shards = options.in_process ? 0 : options.shards;
  context.search = RateSearch{options.learning_rates, SeedsUpTo(options.rate_seeds), threads};
  context.rates_chosen = options.learning_rates.size() > 1;
  if (context.rates_chosen) PRECONDOR_RETURN_IF_ERROR(SearchRates(context.search, data, rows));

  const std::vector<Run> runs = RunsOf(rows);
  absl::StatusOr<std::vector<RunResult>> results =
      options.in_process ? TrainAllInProcess(runs, threads, data) : TrainThroughService(options, runs);
  if (!results.ok()) return results.status();
  auto next = results->begin();
  for (Row& row : rows) {
    for (size_t i = 0; i < row.seeds.size(); ++i) row.results.push_back(std::move(*next++));
  }
  CompareWithAdamw(rows);
  std::cout << "\n" << FormatTable(rows, context);
  if (!options.json_path.empty()) {
    PRECONDOR_RETURN_IF_ERROR(WriteFile(options.json_path, FormatJson(rows, context)));
  }
  if (!options.svg_path.empty()) PRECONDOR_RETURN_IF_ERROR(WriteFile(options.svg_path, RenderSvg(PanelsOf(rows))));
  return absl::OkStatus();
}

int Main(int argc, const char* const* argv) {
  const absl::StatusOr<Options> options =
      ParseOptions(absl::MakeConstSpan(argv + 1, static_cast<size_t>(argc - 1)), PRECONDOR_DIGITS_DATA);
  if (!options.ok()) {
    std::cerr << "precondor-digits: " << options.status().message() << "; see --help\n";
    return 2;
  }
  if (options->help) {
    std::cout << HelpText();
    return 0;
  }
  if (options->worker_rank >= 0) return WorkerMain(options->worker_rank, options->reducer_fd);
  const absl::Status status = RunAll(*options);
  if (status.ok()) return 0;
  std::cerr << "precondor-digits: " << status.ToString() << "\n";
  return 1;
}

}  // namespace
}  // namespace precondor::digits

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  return precondor::digits::Main(argc, argv);
}

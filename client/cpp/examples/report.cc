// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/report.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include <nlohmann/json.hpp>

namespace precondor::digits {
namespace {

using nlohmann::json;

std::vector<double> Finals(const Row& row, const std::function<double(const CurvePoint&)>& value) {
  std::vector<double> finals;
  for (const RunResult& result : row.results) finals.push_back(value(result.curve.back()));
  return finals;
}

double HeldOutLoss(const CurvePoint& point) { return point.held_out_loss; }
double HeldOutAccuracy(const CurvePoint& point) { return point.held_out_accuracy; }
double TrainingLoss(const CurvePoint& point) { return point.training_loss; }

// "median (smallest - largest)".
std::string Spread(const std::vector<double>& values, int digits) {
  const auto text = [&](double value) { return absl::StrFormat("%.*f", digits, value); };
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return absl::StrCat(text(Median(values)), " (", text(*low), "-", text(*high), ")");
}

std::string Steps(const std::vector<std::optional<int64_t>>& steps) {
  if (steps.empty()) return "-";
  std::vector<double> values;
  for (const std::optional<int64_t>& step : steps) {
    values.push_back(step ? static_cast<double>(*step) : std::numeric_limits<double>::infinity());
  }
  std::sort(values.begin(), values.end());
  const auto text = [](double value) { return value > 1e9 ? std::string("never") : absl::StrFormat("%.0f", value); };
  return absl::StrCat(text(Median(values)), " (", text(values.front()), "-", text(values.back()), ")");
}

double PerStep(const Row& row, int64_t RunResult::*bytes) {
  double sum = 0;
  double steps = 0;
  for (const RunResult& result : row.results) {
    sum += static_cast<double>(result.*bytes);
    steps += static_cast<double>(result.steps);
  }
  return sum / steps;
}

double SecondsPerRun(const Row& row) {
  double sum = 0;
  for (const RunResult& result : row.results) sum += result.seconds;
  return sum / static_cast<double>(row.results.size());
}

// The first step in first order, seed by seed; none where there was none.
std::vector<std::optional<int64_t>> FallbackSteps(const Row& row) {
  std::vector<std::optional<int64_t>> steps;
  for (const RunResult& result : row.results) {
    const auto found = std::find_if(result.stretches.begin(), result.stretches.end(),
                                    [](const Stretch& stretch) { return stretch.mode == Mode::kFirstOrder; });
    steps.push_back(found == result.stretches.end() ? std::nullopt
                                                    : std::optional<int64_t>(static_cast<int64_t>(found->first_step)));
  }
  return steps;
}

bool FallsBack(const std::vector<Row>& rows) {
  return std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.run.method.fallback != "never"; });
}

bool Classifies(const Row& row) { return row.run.task.model.objective == Objective::kClassify; }

std::vector<std::string> Cells(const Row& row, bool in_process, bool fallback) {
  const bool classifies = Classifies(row);
  std::vector<std::string> cells = {
      row.run.method.method,
      row.run.method.statistics,
      row.run.method.representation,
      row.run.optimizer,
      absl::StrFormat("%g", row.run.learning_rate),
      Spread(Finals(row, HeldOutLoss), 4),
      classifies ? Spread(Finals(row, HeldOutAccuracy), 3) : "-",
      classifies ? Spread(Finals(row, TrainingLoss), 5) : "-",
      Steps(row.steps_to_adamw_final),
      in_process ? "-" : absl::StrFormat("%.0f", PerStep(row, &RunResult::statistics_bytes)),
      in_process ? "-" : absl::StrFormat("%.0f", PerStep(row, &RunResult::gradient_bytes)),
      absl::StrFormat("%.2f", SecondsPerRun(row))};
  if (fallback) {
    cells.push_back(row.run.method.fallback);
    cells.push_back(Steps(FallbackSteps(row)));
  }
  return cells;
}

std::string Aligned(const std::vector<std::vector<std::string>>& lines) {
  std::vector<size_t> widths(lines.front().size());
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string out;
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      absl::StrAppend(&out, line[i]);
      if (i + 1 < line.size()) out.append(widths[i] - line[i].size() + 2, ' ');
    }
    out.push_back('\n');
  }
  return out;
}

std::string Footer(const std::vector<Row>& rows, const ReportContext& context) {
  const Run& run = rows.front().run;
  std::string out = absl::StrCat(
      "Values: median (smallest-largest) of ", rows.front().seeds.size(), " seeds. to AdamW: steps until the ",
      "loss that AdamW without preconditioning ends with from the same seed (autoencoder: held-out, ",
      "classifier: training), evaluated every ", kEvaluateEvery, " steps.\n");
  if (context.rates_chosen) {
    absl::StrAppend(&out, "Learning rates: for every row the best final held-out loss (median of ",
                    context.search.seeds.size(), context.search.seeds.size() == 1 ? " seed" : " seeds",
                    ") on the same grid ", absl::StrJoin(context.search.grid, ", "),
                    ", doubled or halved further while an end is best; searched in process, where training takes the ",
                    "same course, and linearly decayed.\n");
  }
  if (context.in_process) {
    absl::StrAppend(&out, "In process: no service, no bytes on the wire.\n");
  } else {
    absl::StrAppend(&out, "Through the service: ", run.workers, " worker processes, ", context.shards, " shards, ",
                    ExchangeModeName(run.exchange),
                    ". B/step: payload bytes of all workers a step, gradients both ways. s/run: one run's steps.\n");
  }
  return out;
}

json StepsJson(const std::vector<std::optional<int64_t>>& steps) {
  json out = json::array();
  for (const std::optional<int64_t>& step : steps) out.push_back(step ? json(*step) : json(nullptr));
  return out;
}

// Of one seed: every stretch of steps in one mode.
json ModesJson(const RunResult& result) {
  json modes = json::array();
  for (const Stretch& stretch : result.stretches) {
    const auto steps = static_cast<double>(stretch.steps);
    modes.push_back({{"first_step", stretch.first_step},
                     {"mode", std::string(ModeName(stretch.mode))},
                     {"steps", stretch.steps},
                     {"seconds", stretch.seconds},
                     {"bytes_per_step",
                      {{"statistics", static_cast<double>(stretch.statistics_bytes) / steps},
                       {"gradients", static_cast<double>(stretch.gradient_bytes) / steps}}}});
  }
  return modes;
}

}  // namespace

std::string RowLabel(const Row& row) {
  const MethodVariant& method = row.run.method;
  const absl::StatusOr<MethodVariant> own = FindMethod(method.name);
  const bool other = own.ok() && own->fallback != method.fallback;
  return absl::StrCat(method.name, other ? absl::StrCat(" ", method.fallback) : "", " + ", row.run.optimizer);
}

void CompareWithAdamw(std::vector<Row>& rows) {
  for (Row& row : rows) {
    row.steps_to_adamw_final.clear();
    const auto adamw = std::find_if(rows.begin(), rows.end(), [&](const Row& other) {
      return other.run.task.name == row.run.task.name && other.run.method.name == "none" &&
             other.run.optimizer == "adamw";
    });
    if (adamw == rows.end()) continue;
    for (size_t i = 0; i < row.results.size(); ++i) {
      const double target = CriterionLoss(row.run.task, adamw->results[i].curve.back());
      const auto& curve = row.results[i].curve;
      const auto reached = std::find_if(curve.begin(), curve.end(), [&](const CurvePoint& point) {
        return CriterionLoss(row.run.task, point) <= target;
      });
      row.steps_to_adamw_final.push_back(reached == curve.end() ? std::nullopt : std::optional<int64_t>(reached->step));
    }
  }
}

std::string FormatTable(const std::vector<Row>& rows, const ReportContext& context) {
  std::vector<std::string> heading = {"method",   "statistics",        "repr.",           "optimizer",
                                      "lr",       "held-out loss",     "accuracy",        "training loss",
                                      "to AdamW", "statistics B/step", "gradient B/step", "s/run"};
  const bool fallback = FallsBack(rows);
  if (fallback) heading.insert(heading.end(), {"fallback", "1st order from"});
  std::string out;
  std::string task;
  std::vector<std::vector<std::string>> lines;
  const auto flush = [&] {
    if (!lines.empty()) absl::StrAppend(&out, Aligned(lines), "\n");
    lines = {heading};
  };
  for (const Row& row : rows) {
    if (row.run.task.name != task) {
      flush();
      task = row.run.task.name;
      absl::StrAppend(&out, task, " (", absl::StrJoin(row.run.task.model.widths, "-"), ", ", row.run.task.steps,
                      " steps, batch ", kBatchSize, ")\n");
    }
    lines.push_back(Cells(row, context.in_process, fallback));
  }
  flush();
  return absl::StrCat(out, Footer(rows, context));
}

// Text: JSON numbers end at 2^53.
json WeightsHashes(const Row& row) {
  json hashes = json::array();
  for (const RunResult& result : row.results) hashes.push_back(absl::StrFormat("%016x", result.weights_hash));
  return hashes;
}

std::string FormatJson(const std::vector<Row>& rows, const ReportContext& context) {
  json runs = json::array();
  for (const Row& row : rows) {
    json run{{"task", row.run.task.name},
             {"method", row.run.method.method},
             {"statistics", row.run.method.statistics},
             {"representation", row.run.method.representation},
             {"base_optimizer", row.run.optimizer},
             {"exchange", context.in_process ? "IN_PROCESS" : std::string(ExchangeModeName(row.run.exchange))},
             {"workers", row.run.workers},
             {"shards", context.shards},
             {"steps", row.run.task.steps},
             {"learning_rate", row.run.learning_rate},
             {"seeds", row.seeds},
             {"final_loss", Finals(row, HeldOutLoss)},
             {"weights_hash", WeightsHashes(row)},
             {"steps_to_adamw_final", StepsJson(row.steps_to_adamw_final)},
             {"bytes_per_step",
              {{"statistics", PerStep(row, &RunResult::statistics_bytes)},
               {"gradients", PerStep(row, &RunResult::gradient_bytes)}}},
             {"seconds", SecondsPerRun(row)},
             {"fallback", row.run.method.fallback},
             {"first_order_from", StepsJson(FallbackSteps(row))},
             {"modes", json::array()}};
    for (const RunResult& result : row.results) run["modes"].push_back(ModesJson(result));
    if (Classifies(row)) {
      run["final_accuracy"] = Finals(row, HeldOutAccuracy);
      run["final_training_loss"] = Finals(row, TrainingLoss);
    }
    runs.push_back(std::move(run));
  }
  return absl::StrCat(json{{"runs", runs}}.dump(2), "\n");
}

}  // namespace precondor::digits

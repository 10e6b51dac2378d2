// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/results.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace precondor::digits {
namespace {

std::string Number(double value) { return std::isfinite(value) ? absl::StrFormat("%.17g", value) : "null"; }

template <typename T>
std::string List(const std::vector<T>& values) {
  const auto number = [](std::string* out, T value) { absl::StrAppend(out, Number(static_cast<double>(value))); };
  return absl::StrCat("[", absl::StrJoin(values, ", ", number), "]");
}

}  // namespace

absl::Status CheckReplicas(const std::vector<RankResult>& ranks) {
  for (const RankResult& rank : ranks) {
    const bool weights = HashWeights(rank.trained.weights) == HashWeights(ranks.front().trained.weights);
    if (weights && rank.log.modes == ranks.front().log.modes) continue;
    return absl::InternalError(absl::StrCat("expected equal replicas, but the ", weights ? "modes" : "final weights",
                                            " of two workers differ"));
  }
  return absl::OkStatus();
}

std::string ResultJson(const Run& run, const std::vector<RankResult>& ranks) {
  const TrainResult& first = ranks.front().trained;
  const CurvePoint& last = first.curve.back();
  StepLog log = ranks.front().log;
  for (size_t r = 1; r < ranks.size(); ++r) {
    for (size_t i = 0; i < log.seconds.size(); ++i) {
      log.seconds[i] = std::max(log.seconds[i], ranks[r].log.seconds[i]);
      log.statistics_bytes[i] += ranks[r].log.statistics_bytes[i];
      log.gradient_bytes[i] += ranks[r].log.gradient_bytes[i];
    }
  }
  const auto point = [](std::string* out, const CurvePoint& p) {
    absl::StrAppend(out, "[", p.step, ", ", Number(p.held_out_loss), ", ", Number(p.held_out_accuracy), ", ",
                    Number(p.training_loss), "]");
  };
  const auto mode = [](std::string* out, Mode m) { absl::StrAppend(out, "\"", ModeName(m), "\""); };
  std::string out = absl::StrFormat(
      R"({"task": "%s", "method": "%s", "base_optimizer": "%s", "exchange": "%s", "workers": %d, "steps": %d,)",
      run.task.name, run.method.name, run.optimizer, ExchangeModeName(run.exchange), run.workers, run.task.steps);
  absl::StrAppendFormat(&out, "\n\"seed\": %d, \"learning_rate\": %s, \"final_loss\": %s, \"skipped_steps\": %d,\n",
                        run.seed, Number(run.learning_rate), Number(last.held_out_loss), first.skipped_steps);
  if (run.task.model.objective == Objective::kClassify) {
    absl::StrAppend(&out, "\"final_accuracy\": ", Number(last.held_out_accuracy),
                    ", \"final_training_loss\": ", Number(last.training_loss), ",\n");
  }
  // The hash is text: JSON numbers end at 2^53.
  absl::StrAppendFormat(&out, "\"weights_hash\": \"%016x\", \"seconds\": %s,\n\"curve\": [%s],\n",
                        HashWeights(first.weights), Number(first.seconds), absl::StrJoin(first.curve, ", ", point));
  absl::StrAppend(&out, "\"first_step\": ", log.first_step, ", \"modes\": [", absl::StrJoin(log.modes, ", ", mode),
                  "],\n\"step_seconds\": ", List(log.seconds), ",\n\"statistics_bytes\": ", List(log.statistics_bytes),
                  ",\n\"gradient_bytes\": ", List(log.gradient_bytes), "}\n");
  return out;
}

}  // namespace precondor::digits

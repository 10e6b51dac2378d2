// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/options.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "client/cpp/tools/flags.h"
#include "kernels/base/status_macros.h"

namespace precondor::digits {
namespace {

bool SetRate(absl::string_view text, double& out) { return absl::SimpleAtod(text, &out) && out > 0 && out <= 1e6; }

// Settings for runs of a few hundred steps (docs/develop/lab/digits.md).
bool SetFallback(absl::string_view name, FallbackConfig& config) {
  config = {.rate_decay = 0.98,
            .min_steps = 60,
            .beta = 0.04,
            .patience_steps = 20,
            .probe_interval_steps = 60,
            .probe_settle_steps = 5,
            .probe_steps = 20,
            .probe_wins = 2};
  if (absl::ConsumePrefix(&name, "at-step:")) {
    config.policy = FallbackPolicy::kAtStep;
    return absl::SimpleAtoi(name, &config.at_step.emplace());
  }
  if (name == "loss-rate") config.policy = FallbackPolicy::kLossRate;
  if (name == "cost-aware") config.policy = FallbackPolicy::kCostAware;
  return name == "never" || config.policy != FallbackPolicy::kNever;
}

// True and false are flags, numbers are numbers, the rest is text.
bool AddMethodOption(absl::string_view text, MethodConfig& method) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
  if (text.find('=') == absl::string_view::npos || parts.first.empty()) return false;
  OptionValue& value = method.options[parts.first];
  double number = 0;
  if (parts.second == "true" || parts.second == "false") {
    value = parts.second == "true";
  } else if (absl::SimpleAtod(parts.second, &number)) {
    value = number;
  } else {
    value = parts.second;
  }
  return true;
}

std::vector<Flag> Flags(Options& o) {
  Run& run = o.run;
  SessionSpec& session = run.session;
  const auto set_task = [&run](absl::string_view v) { return SetTask(v, run); };
  const auto add_option = [&session](absl::string_view v) { return AddMethodOption(v, session.method); };
  const auto set_optimizer = [&run](absl::string_view v) { return FindOptimizer(run.optimizer = std::string(v)).ok(); };
  const auto set_rate = [&run](absl::string_view v) { return SetRate(v, run.learning_rate); };
  const auto set_fallback = [&session](absl::string_view v) { return SetFallback(v, session.fallback); };
  return {
      {"coordinator", Text(o.coordinator), "HOST:PORT", "the service; deploy/quickstart.sh starts one"},
      {"task", set_task, "autoencoder or classifier", "(autoencoder)"},
      {"steps", Integer(o.steps, 1, 1000000), "1 ... 1000000", "instead of the task's own, 600 and 300"},
      {"method", Text(session.method.name), "NAME", "of docs/use/methods; identity is the optimizer alone (mkor)"},
      {"option", add_option, "NAME=VALUE", "of the method, e.g. rank=16; may be repeated"},
      {"statistics", Choice(session.statistics, StatisticsKind::kCovariance, StatisticsKindName),
       "signed, mean, per_worker_mean or covariance", "for a method that takes statistics (signed)"},
      {"optimizer", set_optimizer, "adamw, lamb, sgd, nesterov or plain", "plain is SGD without momentum (adamw)"},
      {"learning-rate", set_rate, "RATE", "at the first step, above 0; it falls linearly to zero (0.016)"},
      {"fallback", set_fallback, "never, loss-rate, cost-aware or at-step:N", "to first order (never)"},
      {"exchange", Choice(session.exchange, ExchangeMode::kReplay, ExchangeModeName),
       "direct, delegate, replay or pull_factors",
       "direct: the shards average the gradients; delegate: the workers do; replay and pull_factors: the workers do, "
       "and\n"
       "      precondition themselves (methods of mkor and eva) (direct)"},
      {"workers", Integer(session.world_size, 1, kBatchSize), "1 ... 128", "threads of this process (4)"},
      {"seed", Integer(session.seed, 0, 1 << 30), "0 ... 2^30", "of weights, batches and sketches (1)"},
      {"data", Text(o.data_path), "FILE", "digits.csv, when not where it was at build time"},
      {"csv", Text(o.csv_path), "FILE", "write a line for each worker and step"},
  };
}

}  // namespace

bool SetTask(absl::string_view name, Run& run) {
  run.task = std::string(name);
  run.steps = name == "classifier" ? 300 : 600;
  run.model = name == "classifier" ? MlpSpec{{64, 64, 64, 10}, Objective::kClassify}
                                   : MlpSpec{{64, 48, 24, 8, 24, 48, 64}, Objective::kReconstruct};
  run.session.layers = LayersOf(run.model);
  return name == "classifier" || name == "autoencoder";
}

absl::StatusOr<OptimizerConfig> FindOptimizer(absl::string_view name) {
  OptimizerConfig config;
  config.name = name == "adamw" || name == "lamb" ? std::string(name) : "sgd";
  config.nesterov = name == "nesterov";
  config.nvlamb = name == "lamb";  // a trust ratio for every layer: without weight decay LAMB has none otherwise
  if (name == "plain") config.momentum = 0;
  if (config.name == name || config.nesterov || config.momentum == 0) return config;
  return absl::NotFoundError(absl::StrCat("no optimizer ", name));
}

absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments, absl::string_view default_data_path) {
  Options options;
  options.data_path = std::string(default_data_path);
  SetTask("autoencoder", options.run);
  PRECONDOR_ASSIGN_OR_RETURN(const bool trains, ParseFlags(arguments, Flags(options)));
  options.help = !trains;
  if (options.steps > 0) options.run.steps = options.steps;
  return options;
}

std::string HelpText() {
  Options defaults;
  std::string flags;
  for (const Flag& flag : Flags(defaults)) {
    absl::StrAppend(&flags, "  --", flag.name, " ", flag.expected, "\n      ", flag.help, "\n");
  }
  return absl::StrCat(R"(Usage: digits_trainer --coordinator HOST:PORT [options]

Trains a small network on the UCI handwritten digits with gradients that Precondor preconditions.

)",
                      flags, R"(
Examples:
  digits_trainer --coordinator localhost:7070 --method identity
  digits_trainer --coordinator localhost:7070 --option rank=16 --learning-rate 0.032 --csv run.csv
  digits_trainer --coordinator localhost:7070 --method soap --optimizer plain --learning-rate 0.032
)");
}

}  // namespace precondor::digits

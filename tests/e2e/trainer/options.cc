// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/options.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "client/cpp/tools/flags.h"
#include "kernels/base/status_macros.h"

namespace precondor::digits {
namespace {

bool SetRate(absl::string_view text, double& out) { return absl::SimpleAtod(text, &out) && out > 0 && out <= 1e6; }

// Settings for runs of a few hundred steps (docs/develop/lab/digits.md).
bool SetFallback(absl::string_view name, FallbackConfig& config) {
  config = {.rate_decay = 0.98, .min_steps = 60, .beta = 0.04, .patience_steps = 20};
  if (absl::ConsumePrefix(&name, "at-step:")) {
    config.policy = FallbackPolicy::kAtStep;
    return absl::SimpleAtoi(name, &config.at_step.emplace());
  }
  if (name == "loss-rate") config.policy = FallbackPolicy::kLossRate;
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
  const auto set_optimizer = [&run](absl::string_view v) {
    return Optimizer::Make(run.optimizer = std::string(v)).ok();
  };
  const auto set_rate = [&run](absl::string_view v) { return SetRate(v, run.learning_rate); };
  const auto set_fallback = [&session](absl::string_view v) { return SetFallback(v, session.fallback); };
  return {
      {"coordinator", Text(o.coordinator), "HOST:PORT"},
      {"task", set_task, "autoencoder or classifier"},
      {"steps", Integer(o.steps, 1, 1000000), "1 ... 1000000"},
      {"method", Text(session.method.name), "NAME"},  // identity is the optimizer alone
      {"option", add_option, "NAME=VALUE"},           // of the method; may be repeated
      {"statistics", Choice(session.statistics, StatisticsKind::kCovariance, StatisticsKindName),
       "signed, mean, per_worker_mean or covariance"},
      {"optimizer", set_optimizer, "adamw, lamb, sgd or plain"},
      {"learning-rate", set_rate, "RATE"},  // at the first step; it falls linearly to zero
      {"fallback", set_fallback, "never, loss-rate or at-step:N"},
      // DIRECT: the shards average the gradients, otherwise the workers do.
      {"exchange", Choice(session.exchange, ExchangeMode::kReplay, ExchangeModeName),
       "direct, delegate, replay or pull_factors"},
      {"workers", Integer(session.world_size, 1, kBatchSize), "1 ... 128"},  // threads of this process
      {"seed", Integer(session.seed, 0, 1 << 30), "0 ... 2^30"},             // of weights, batches and sketches
      {"data", Text(o.data_path), "FILE"},
      {"csv", Text(o.csv_path), "FILE"},  // a line for each worker and step
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

absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments, absl::string_view default_data_path) {
  Options options;
  options.data_path = std::string(default_data_path);
  SetTask("autoencoder", options.run);
  PRECONDOR_ASSIGN_OR_RETURN(const ParsedOptions flags, ParseFlags(arguments, Flags(options)));
  if (flags.help) return absl::InvalidArgumentError("tests/e2e/trainer/options.cc has the flags");
  if (options.steps > 0) options.run.steps = options.steps;
  return options;
}

}  // namespace precondor::digits

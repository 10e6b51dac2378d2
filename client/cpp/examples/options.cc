// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/options.h"

#include <functional>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"

namespace precondor::digits {
namespace {

using Setter = std::function<absl::Status(absl::string_view)>;

Setter Text(std::string* out) {
  return [out](absl::string_view value) {
    *out = std::string(value);
    return absl::OkStatus();
  };
}

template <typename T>
Setter Integer(T* out, int64_t low, int64_t high) {
  return [=](absl::string_view text) -> absl::Status {
    int64_t value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < low || value > high) {
      return absl::InvalidArgumentError(absl::StrCat("expected a number ", low, " ... ", high, ", got \"", text, "\""));
    }
    *out = static_cast<T>(value);
    return absl::OkStatus();
  };
}

absl::Status SetRate(absl::string_view text, double* out) {
  if (absl::SimpleAtod(text, out) && *out > 0 && *out <= 1e6) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("expected a positive rate, got \"", text, "\""));
}

// One of `choices`, by what `name` calls it, in any case.
template <typename T>
Setter Choice(T* out, std::initializer_list<T> choices, absl::string_view (*name)(T), absl::string_view expected) {
  return [=, all = std::vector<T>(choices)](absl::string_view text) -> absl::Status {
    for (const T choice : all) {
      if (absl::AsciiStrToUpper(text) != name(choice)) continue;
      *out = choice;
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("expected ", expected, ", got \"", text, "\""));
  };
}

std::map<absl::string_view, Setter> Setters(Options& o) {
  Run& run = o.run;
  return {
      {"coordinator", Text(&o.coordinator)},
      {"session", Text(&o.session)},
      {"task",
       [&run](absl::string_view v) -> absl::Status {
         PRECONDOR_ASSIGN_OR_RETURN(run.task, FindTask(v));
         return absl::OkStatus();
       }},
      {"method", Text(&run.method.name)},
      {"option", [&run](absl::string_view v) { return AddMethodOption(v, run.method); }},
      {"statistics", Choice(&run.statistics,
                            {StatisticsKind::kMean, StatisticsKind::kPerWorkerMean, StatisticsKind::kSigned,
                             StatisticsKind::kCovariance},
                            StatisticsKindName, "mean, per_worker_mean, signed or covariance")},
      {"fallback",
       [&run](absl::string_view v) -> absl::Status {
         PRECONDOR_ASSIGN_OR_RETURN(run.fallback, FindFallback(v));
         return absl::OkStatus();
       }},
      {"optimizer",
       [&run](absl::string_view v) {
         run.optimizer = std::string(v);
         return FindOptimizer(v).status();
       }},
      {"learning-rate", [&run](absl::string_view v) { return SetRate(v, &run.learning_rate); }},
      {"exchange",
       Choice(&run.exchange,
              {ExchangeMode::kDirect, ExchangeMode::kDelegate, ExchangeMode::kReplay, ExchangeMode::kPullFactors},
              ExchangeModeName, "direct, delegate, replay or pull_factors")},
      {"on-shard-loss", Choice(&run.on_shard_loss, {ShardLossPolicy::kWait, ShardLossPolicy::kDegrade},
                               ShardLossPolicyName, "wait or degrade")},
      {"workers", Integer(&run.workers, 1, kBatchSize)},
      {"seed", Integer(&run.seed, 0, 1 << 30)},
      {"steps", Integer(&o.steps, 1, 1000000)},
      {"rank", Integer(&o.rank, 0, kBatchSize - 1)},
      {"checkpoint", Text(&o.checkpoint_path)},
      {"data", Text(&o.data_path)},
      {"json", Text(&o.json_path)},
  };
}

absl::Status CheckTogether(const Options& options) {
  if (options.rank >= 0 && options.run.exchange != ExchangeMode::kDirect) {
    return absl::InvalidArgumentError("--rank: expected --exchange=direct, in which workers share nothing");
  }
  if (options.rank >= options.run.workers) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rank: expected less than --workers=", options.run.workers, ", got ", options.rank));
  }
  if (options.rank >= 0 && options.session.empty()) {
    return absl::InvalidArgumentError("--rank: expected --session too, with one name for all workers");
  }
  if (!options.checkpoint_path.empty() && options.rank < 0) {
    return absl::InvalidArgumentError("--checkpoint: expected --rank too: a checkpoint is of one worker");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AddMethodOption(absl::string_view text, MethodConfig& method) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
  if (text.find('=') == absl::string_view::npos || parts.first.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("expected NAME=VALUE, got \"", text, "\""));
  }
  OptionValue& value = method.options[parts.first];
  double number = 0;
  if (parts.second == "true" || parts.second == "false") {
    value = parts.second == "true";
  } else if (absl::SimpleAtod(parts.second, &number)) {
    value = number;
  } else {
    value = parts.second;
  }
  return absl::OkStatus();
}

absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments, absl::string_view default_data_path) {
  Options options;
  options.data_path = std::string(default_data_path);
  PRECONDOR_ASSIGN_OR_RETURN(options.run.task, FindTask("autoencoder"));
  const std::map<absl::string_view, Setter> setters = Setters(options);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      options.help = true;
      return options;
    }
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(argument, absl::MaxSplits('=', 1));
    const auto setter = argument.substr(0, 2) == "--" ? setters.find(parts.first.substr(2)) : setters.end();
    if (setter == setters.end()) return absl::InvalidArgumentError(absl::StrCat("unknown argument ", argument));
    absl::string_view value = parts.second;
    if (argument.find('=') == absl::string_view::npos) {
      if (++i == arguments.size()) return absl::InvalidArgumentError(absl::StrCat(argument, " needs a value"));
      value = arguments[i];
    }
    const absl::Status status = setter->second(value);
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat(parts.first, ": ", status.message()));
  }
  if (options.steps > 0) options.run.task.steps = options.steps;
  PRECONDOR_RETURN_IF_ERROR(CheckTogether(options));
  return options;
}

std::string HelpText() {
  return R"(Usage: precondor-digits --coordinator HOST:PORT [options]

Trains a small network on the UCI handwritten digits with gradients that Precondor preconditions. Each worker computes
its part of each batch. The workers are threads of this process, or with --rank one process each.

  --coordinator HOST:PORT  the service; deploy/quickstart.sh starts one
  --task NAME              autoencoder or classifier (autoencoder)
  --steps N                instead of the task's own, 600 and 300
  --method NAME            a method of docs/methods; identity is the optimizer alone (mkor)
  --option NAME=VALUE      an option of the method, e.g. rank=16; may be repeated
  --statistics KIND        signed, mean, per_worker_mean or covariance, for a method that takes statistics (signed)
  --optimizer NAME         adamw, lamb, sgd, nesterov, or plain, which is SGD without momentum (adamw)
  --learning-rate RATE     at the first step; it falls linearly to zero (0.016)
  --fallback POLICY        never, loss-rate, cost-aware or at-step:N: when the run falls back to first order (never)
  --exchange MODE          direct: the shards average the gradients; delegate: the workers do; replay and pull_factors:
                           the workers do, and precondition themselves (methods of mkor and eva) (direct)
  --on-shard-loss POLICY   wait until the shard is back, or degrade: its layers begin anew on the others; with
                           --exchange=delegate (wait)
  --workers N              workers of the job, 1 ... 128 (4)
  --seed N                 of weights, batches and sketches (1)
  --rank N                 run this worker alone; the other ranks are other processes with the same flags
  --session NAME           of the session, for --rank (named after this process)
  --checkpoint FILE        with --rank: write the worker's state there before each step, and go on from it if it exists
  --data FILE              digits.csv, when not where it was at build time
  --json FILE              write the results (docs/digits.md has the fields)
  --help                   this text

Examples:
  precondor-digits --coordinator localhost:7070 --method identity
  precondor-digits --coordinator localhost:7070 --option rank=16 --learning-rate 0.032 --json run.json
  precondor-digits --coordinator localhost:7070 --method soap --optimizer plain --learning-rate 0.032
)";
}

}  // namespace precondor::digits

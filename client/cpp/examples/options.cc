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

constexpr int64_t kMaxSeeds = 1000;
constexpr int64_t kMaxSteps = 1000000;

template <typename T>
absl::Status ParseInteger(absl::string_view text, int64_t low, int64_t high, T* out) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < low || value > high) {
    return absl::InvalidArgumentError(absl::StrCat("expected a number ", low, " ... ", high, ", got \"", text, "\""));
  }
  *out = static_cast<T>(value);
  return absl::OkStatus();
}

// Each name of a comma-separated list through `find`; "all" is `all`.
template <typename T, typename Find>
absl::Status ParseNames(absl::string_view text, std::vector<T> all, Find find, std::vector<T>* out) {
  if (text == "all") {
    *out = std::move(all);
    return absl::OkStatus();
  }
  out->clear();
  for (const absl::string_view name : absl::StrSplit(text, ',')) {
    PRECONDOR_ASSIGN_OR_RETURN(T value, find(name));
    out->push_back(std::move(value));
  }
  return absl::OkStatus();
}

absl::Status ParseRates(absl::string_view text, std::vector<double>* out) {
  out->clear();
  for (const absl::string_view field : absl::StrSplit(text, ',')) {
    double rate = 0;
    if (!absl::SimpleAtod(field, &rate) || !(rate > 0) || rate > 1e6 || (!out->empty() && rate <= out->back())) {
      return absl::InvalidArgumentError(absl::StrCat("expected positive rates, ascending, got \"", text, "\""));
    }
    out->push_back(rate);
  }
  return absl::OkStatus();
}

absl::Status ParseExchange(absl::string_view text, ExchangeMode* out) {
  for (const ExchangeMode mode :
       {ExchangeMode::kDirect, ExchangeMode::kDelegate, ExchangeMode::kReplay, ExchangeMode::kPullFactors}) {
    if (absl::AsciiStrToUpper(text) != ExchangeModeName(mode)) continue;
    *out = mode;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("expected direct, delegate, replay or pull_factors, got \"", text, "\""));
}

absl::Status ParseShardLoss(absl::string_view text, ShardLossPolicy* out) {
  if (text != "wait" && text != "degrade") {
    return absl::InvalidArgumentError(absl::StrCat("expected wait or degrade, got \"", text, "\""));
  }
  *out = text == "wait" ? ShardLossPolicy::kWait : ShardLossPolicy::kDegrade;
  return absl::OkStatus();
}

// Few enough runs for continuous integration: the comparisons that matter, one seed in the rate search.
void MakeShort(Options& options) {
  options.methods = {*FindMethod("none"), *FindMethod("mean-lowrank"), *FindMethod("signed-lowrank")};
  options.optimizers = {"adamw"};
  options.seeds = 2;
  options.rate_seeds = 1;
  options.learning_rates = {0.008, 0.016, 0.032};
}

// There is no coordinator in process, and so no decision: all methods without those that fall back.
absl::Status SettleFallback(Options& options) {
  std::vector<MethodVariant>& methods = options.methods;
  if (options.in_process && methods.size() == AllMethods().size()) {
    std::erase_if(methods, [](const MethodVariant& method) { return method.fallback != "never"; });
  }
  for (MethodVariant& method : methods) {
    if (!options.fallback.empty() && method.name != "none") method.fallback = options.fallback;
    if (options.in_process && method.fallback != "never") {
      return absl::InvalidArgumentError(
          absl::StrCat(method.name, " falls back (", method.fallback, "): that takes a coordinator, not --in-process"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> KnownOptimizer(absl::string_view name) {
  PRECONDOR_RETURN_IF_ERROR(FindOptimizer(name).status());
  return std::string(name);
}

using Setter = std::function<absl::Status(absl::string_view)>;

std::map<absl::string_view, Setter> Setters(Options& o) {
  const auto text = [](std::string* out) {
    return [out](absl::string_view value) {
      *out = std::string(value);
      return absl::OkStatus();
    };
  };
  const auto integer = [](auto* out, int64_t low, int64_t high) {
    return [=](absl::string_view value) { return ParseInteger(value, low, high, out); };
  };
  return {
      {"coordinator", text(&o.coordinator)},
      {"data", text(&o.data_path)},
      {"json", text(&o.json_path)},
      {"svg", text(&o.svg_path)},
      {"shards", integer(&o.shards, 1, 1024)},
      {"workers", integer(&o.workers, 1, kBatchSize)},
      {"seeds", integer(&o.seeds, 1, kMaxSeeds)},
      {"rate-seeds", integer(&o.rate_seeds, 1, kMaxSeeds)},
      {"worker-restarts", integer(&o.worker_restarts, 0, 1 << 20)},
      {"checkpoint-dir", text(&o.checkpoint_dir)},
      {"steps", integer(&o.steps, 1, kMaxSteps)},
      {"worker-rank", integer(&o.worker_rank, 0, kBatchSize - 1)},
      {"reducer-fd", integer(&o.reducer_fd, 0, 1 << 20)},
      {"tasks", [&o](absl::string_view v) { return ParseNames(v, AllTasks(), FindTask, &o.tasks); }},
      {"methods", [&o](absl::string_view v) { return ParseNames(v, AllMethods(), FindMethod, &o.methods); }},
      {"optimizers",
       [&o](absl::string_view v) {
         return ParseNames(v, {"sgd", "nesterov", "plain", "adamw", "lamb"}, KnownOptimizer, &o.optimizers);
       }},
      {"fallback",
       [&o](absl::string_view v) {
         o.fallback = std::string(v);
         return FindFallback(v).status();
       }},
      {"learning-rates", [&o](absl::string_view v) { return ParseRates(v, &o.learning_rates); }},
      {"exchange", [&o](absl::string_view v) { return ParseExchange(v, &o.exchange); }},
      {"on-shard-loss", [&o](absl::string_view v) { return ParseShardLoss(v, &o.on_shard_loss); }},
  };
}

}  // namespace

absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments, absl::string_view default_data_path) {
  Options options;
  options.data_path = std::string(default_data_path);
  options.tasks = AllTasks();
  options.methods = AllMethods();
  options.optimizers = {"adamw", "lamb"};
  options.learning_rates = {0.004, 0.008, 0.016, 0.032, 0.064};
  const std::map<absl::string_view, Setter> setters = Setters(options);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      options.help = true;
    } else if (argument == "--in-process") {
      options.in_process = true;
    } else if (argument == "--short") {
      MakeShort(options);
    } else {
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
  }
  PRECONDOR_RETURN_IF_ERROR(SettleFallback(options));
  if (!options.help && options.worker_rank < 0 && options.in_process == !options.coordinator.empty()) {
    return absl::InvalidArgumentError("expected either --coordinator HOST:PORT or --in-process");
  }
  if ((options.worker_restarts > 0) != !options.checkpoint_dir.empty()) {
    return absl::InvalidArgumentError("--worker-restarts needs --checkpoint-dir, and the other way round");
  }
  if (options.worker_restarts > 0 && options.exchange != ExchangeMode::kDirect) {
    return absl::InvalidArgumentError("--worker-restarts: expected --exchange=direct, where workers share nothing");
  }
  if (options.on_shard_loss == ShardLossPolicy::kDegrade && options.exchange != ExchangeMode::kDelegate) {
    return absl::InvalidArgumentError("--on-shard-loss=degrade: expected --exchange=delegate");
  }
  return options;
}

std::string HelpText() {
  return R"(Usage: precondor-digits (--coordinator HOST:PORT | --in-process) [options]

Trains small networks on the UCI handwritten digits with gradients that Precondor preconditions, and compares methods.
Every worker is a process of its own on its part of each batch. Learning rates are searched first, in this process, for
every method on the same grid; the runs that count then go through the service.

  --coordinator HOST:PORT  the service; deploy/quickstart.sh starts one
  --in-process             no service: the method is called directly, statistics as --workers workers would send them
  --shards N               shards of the service, for the report (1)
  --tasks LIST             classifier, autoencoder, or all (all)
  --methods LIST           none, reference, blend, mean, mean-lowrank, signed, signed-lowrank, kron, soap, muon, eva,
                           kfac, kfac-covariance, mkor-h (signed-lowrank that falls back by loss-rate), or all (all)
  --fallback POLICY        never, loss-rate, cost-aware or at-step:N: when preconditioned runs fall back to first order
                           (each method's own: never, mkor-h loss-rate)
  --optimizers LIST        sgd, nesterov, plain (SGD without momentum), adamw, lamb, or all (adamw,lamb); kron, soap
                           and muon always run on plain
  --exchange MODE          direct: the shards average the gradients; delegate: the workers do, in shared memory; replay
                           and pull_factors: so do they, and precondition themselves (methods of mkor and eva) (direct)
  --on-shard-loss POLICY   wait: until the shard is back; degrade: its layers begin anew on the others; with
                           --exchange=delegate (wait)
  --workers N              worker processes, 1 ... 128 (4)
  --seeds N                runs of each row, seeds 1 ... N (5)
  --rate-seeds N           runs of each rate in the search, seeds 1 ... N (3)
  --learning-rates LIST    the grid to search (0.004,0.008,0.016,0.032,0.064); a single rate is used as it is
  --steps N                instead of the task's own: classifier 300, autoencoder 600
  --short                  none and the low-rank methods under AdamW, 2 seeds, a small grid; flags after it change that
  --data FILE              digits.csv, when not where it was at build time
  --worker-restarts N      start workers that a signal ended again, N times in all, from their own checkpoints (0)
  --checkpoint-dir DIR     an empty folder for these: every worker writes one before each step
  --json FILE, --svg FILE  write the results, and a picture of the loss curves
  --help                   this text

Examples:
  precondor-digits --in-process --short
  precondor-digits --coordinator localhost:7000 --shards 2 --json runs.json --svg curves.svg
  precondor-digits --coordinator localhost:7000 --tasks autoencoder --methods none,signed-lowrank --exchange delegate
  precondor-digits --coordinator localhost:7000 --methods signed-lowrank --fallback at-step:150
)";
}

}  // namespace precondor::digits

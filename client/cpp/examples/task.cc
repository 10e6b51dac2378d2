// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/task.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

#include "kernels/base/check.h"

namespace precondor::digits {
namespace {

MethodVariant Mkor(absl::string_view name, absl::string_view rule, absl::string_view representation,
                   StatisticsKind kind) {
  MethodVariant variant;
  variant.name = std::string(name);
  variant.method = absl::StrCat("mkor ", rule);
  variant.statistics = std::string(StatisticsKindName(kind));
  variant.representation = absl::AsciiStrToLower(representation);
  variant.config.name = "mkor";
  variant.config.options["rule"] = std::string(rule);
  variant.config.options["representation"] = std::string(representation);
  if (representation == "LOW_RANK") variant.config.options["rank"] = static_cast<double>(kLowRank);
  variant.kind = kind;
  return variant;
}

MethodVariant None() {
  MethodVariant variant;
  variant.name = variant.method = variant.statistics = variant.representation = "none";
  variant.config.name = "identity";
  return variant;
}

// Methods that learn from gradients alone have their own momentum and give U a length of their own: under AdamW or LAMB
// it would be normalised twice.
MethodVariant FromGradients(absl::string_view name, absl::string_view method, absl::string_view representation,
                            MethodConfig config) {
  MethodVariant variant;
  variant.name = std::string(name);
  variant.method = std::string(method);
  variant.statistics = "none";
  variant.representation = std::string(representation);
  variant.config = std::move(config);
  variant.optimizer = "plain";
  return variant;
}

// What the trainer can use without a factor common to all layers: U as long as D.
MethodVariant Rescaled(absl::string_view name, absl::string_view method, StatisticsKind kind,
                       absl::string_view representation) {
  MethodVariant variant;
  variant.name = std::string(name);
  variant.method = variant.config.name = std::string(method);
  variant.statistics = std::string(StatisticsKindName(kind));
  variant.representation = std::string(representation);
  variant.config.options["scaling"] = std::string("NORM_RESCALE");
  variant.kind = kind;
  return variant;
}

// As tried (docs/digits.md). The factors begin as the first statistics instead of I, beside which these models' output
// gradients are nothing until it has decayed.
MethodVariant Kfac(absl::string_view name, StatisticsKind kind) {
  MethodVariant variant = Rescaled(name, "kfac", kind, "eigen");
  variant.config.options["factor_decay"] = std::string("piecewise(0, 1: 0.95)");
  variant.config.options["pi_split"] = true;
  variant.config.options["damping"] = std::string("0.00003");
  return variant;
}

MethodVariant MkorH() {
  MethodVariant variant = Mkor("mkor-h", "EXACT_DAMPED", "LOW_RANK", StatisticsKind::kSigned);
  variant.method = "mkor-h EXACT_DAMPED";
  variant.fallback = "loss-rate";
  return variant;
}

template <typename T>
absl::StatusOr<T> FindByName(const std::vector<T>& all, absl::string_view name, absl::string_view what) {
  for (const T& one : all) {
    if (one.name == name) return one;
  }
  return absl::NotFoundError(
      absl::StrCat("no ", what, " \"", name, "\"; there are ",
                   absl::StrJoin(all, ", ", [](std::string* out, const T& one) { absl::StrAppend(out, one.name); })));
}

}  // namespace

std::vector<Task> AllTasks() {
  return {{"classifier", MlpSpec{{64, 64, 64, 10}, Objective::kClassify}, 300, Criterion::kTrainingLoss},
          {"autoencoder", MlpSpec{{64, 48, 24, 8, 24, 48, 64}, Objective::kReconstruct}, 600, Criterion::kHeldOutLoss}};
}

std::vector<MethodVariant> AllMethods() {
  return {None(),
          Mkor("reference", "REFERENCE", "DENSE", StatisticsKind::kMean),
          Mkor("blend", "BLEND", "DENSE", StatisticsKind::kSigned),
          Mkor("mean", "EXACT_DAMPED", "DENSE", StatisticsKind::kMean),
          Mkor("mean-lowrank", "EXACT_DAMPED", "LOW_RANK", StatisticsKind::kMean),
          Mkor("signed", "EXACT_DAMPED", "DENSE", StatisticsKind::kSigned),
          Mkor("signed-lowrank", "EXACT_DAMPED", "LOW_RANK", StatisticsKind::kSigned),
          FromGradients("kron", "kron TRIANGULAR", "triangular", {"kron", {}}),
          FromGradients("soap", "soap", "dense", {"soap", {}}),
          FromGradients("muon", "muon", "none", {"muon", {}}),
          Rescaled("eva", "eva", StatisticsKind::kMean, "mean"),
          Kfac("kfac", StatisticsKind::kSigned),
          Kfac("kfac-covariance", StatisticsKind::kCovariance),
          MkorH()};
}

absl::StatusOr<Task> FindTask(absl::string_view name) { return FindByName(AllTasks(), name, "task"); }

absl::StatusOr<MethodVariant> FindMethod(absl::string_view name) { return FindByName(AllMethods(), name, "method"); }

absl::StatusOr<FallbackConfig> FindFallback(absl::string_view name) {
  FallbackConfig config;
  config.rate_decay = 0.98;
  config.beta = 0.04;
  config.min_steps = 60;
  config.patience_steps = 20;
  config.probe_interval_steps = 60;
  config.probe_settle_steps = 5;
  config.probe_steps = 20;
  config.probe_wins = 2;
  uint64_t step = 0;
  absl::string_view number = name;
  if (name == "never") return config;
  if (name == "loss-rate") {
    config.policy = FallbackPolicy::kLossRate;
  } else if (name == "cost-aware") {
    config.policy = FallbackPolicy::kCostAware;
  } else if (absl::ConsumePrefix(&number, "at-step:") && absl::SimpleAtoi(number, &step)) {
    config.policy = FallbackPolicy::kAtStep;
    config.at_step = step;
  } else {
    return absl::NotFoundError(
        absl::StrCat("no fallback \"", name, "\"; there are never, loss-rate, cost-aware, at-step:N"));
  }
  return config;
}

absl::StatusOr<OptimizerConfig> FindOptimizer(absl::string_view name) {
  OptimizerConfig config;
  if (name == "adamw") return config;
  if (name == "sgd" || name == "nesterov") {
    config.name = "sgd";
    config.nesterov = name == "nesterov";
    return config;
  }
  if (name == "plain") {
    config.name = "sgd";
    config.momentum = 0;
    return config;
  }
  if (name == "lamb") {
    config.name = "lamb";
    config.epsilon = 1e-6;
    config.nvlamb = true;  // a trust ratio for every layer: without weight decay LAMB has none otherwise
    return config;
  }
  return absl::NotFoundError(absl::StrCat("no optimizer \"", name, "\"; there are sgd, nesterov, plain, adamw, lamb"));
}

SessionSpec MakeSessionSpec(const Run& run, absl::string_view name) {
  SessionSpec spec;
  spec.name = std::string(name);
  spec.seed = run.seed;
  spec.world_size = run.workers;
  spec.exchange = run.exchange;
  spec.on_shard_loss = run.on_shard_loss;
  spec.statistics = run.method.kind;
  spec.method = run.method.config;
  const absl::StatusOr<FallbackConfig> fallback = FindFallback(run.method.fallback);
  PRECONDOR_CHECK(fallback.ok());
  spec.fallback = *fallback;
  spec.layers = Mlp(run.task.model, run.seed).Layers();
  return spec;
}

}  // namespace precondor::digits

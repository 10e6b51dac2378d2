// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/run.h"

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace precondor::digits {

absl::StatusOr<Task> FindTask(absl::string_view name) {
  if (name == "classifier") return Task{"classifier", {{64, 64, 64, 10}, Objective::kClassify}, 300};
  if (name == "autoencoder") {
    return Task{"autoencoder", {{64, 48, 24, 8, 24, 48, 64}, Objective::kReconstruct}, 600};
  }
  return absl::NotFoundError(absl::StrCat("expected classifier or autoencoder, got \"", name, "\""));
}

absl::StatusOr<OptimizerConfig> FindOptimizer(absl::string_view name) {
  OptimizerConfig config;
  if (name == "adamw") return config;
  if (name == "lamb") {
    config.name = "lamb";
    config.epsilon = 1e-6;
    config.nvlamb = true;  // a trust ratio for every layer: without weight decay LAMB has none otherwise
    return config;
  }
  config.name = "sgd";
  config.nesterov = name == "nesterov";
  if (name == "plain") config.momentum = 0;
  if (name == "sgd" || name == "nesterov" || name == "plain") return config;
  return absl::NotFoundError(absl::StrCat("expected sgd, nesterov, plain, adamw or lamb, got \"", name, "\""));
}

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
    return absl::NotFoundError(absl::StrCat("expected never, loss-rate, cost-aware or at-step:N, got \"", name, "\""));
  }
  return config;
}

SessionSpec MakeSessionSpec(const Run& run, absl::string_view name) {
  SessionSpec spec;
  spec.name = std::string(name);
  spec.seed = run.seed;
  spec.world_size = run.workers;
  spec.exchange = run.exchange;
  spec.on_shard_loss = run.on_shard_loss;
  spec.statistics = run.statistics;
  spec.method = run.method;
  spec.fallback = run.fallback;
  spec.layers = Mlp(run.task.model, run.seed).Layers();
  return spec;
}

}  // namespace precondor::digits

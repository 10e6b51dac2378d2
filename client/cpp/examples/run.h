// SPDX-License-Identifier: Apache-2.0
// One training run of the example, and the session that it needs.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "client/cpp/examples/mlp.h"
#include "kernels/base/session_spec.h"
#include "precondor/optimizer.h"

namespace precondor::digits {

inline constexpr int64_t kBatchSize = 128;

struct Task {
  std::string name;
  MlpSpec model;
  int64_t steps = 0;
};

// Everything that the course of the training is a function of.
struct Run {
  Task task;
  MethodConfig method;  // "identity" averages the gradients and leaves the rest to the base optimizer
  StatisticsKind statistics = StatisticsKind::kSigned;
  FallbackConfig fallback;
  std::string optimizer = "adamw";
  ExchangeMode exchange = ExchangeMode::kDirect;
  ShardLossPolicy on_shard_loss = ShardLossPolicy::kWait;
  int32_t workers = 4;
  uint64_t seed = 1;
  double learning_rate = 0.016;  // at the first step; falls linearly to zero
};

// "classifier" or "autoencoder"; NotFound otherwise.
absl::StatusOr<Task> FindTask(absl::string_view name);
// "sgd", "nesterov", "plain" (SGD without momentum), "adamw" or "lamb", each with the settings of the example.
absl::StatusOr<OptimizerConfig> FindOptimizer(absl::string_view name);
// "never", "loss-rate", "cost-aware" or "at-step:N", with settings for runs of a few hundred steps (docs/digits.md).
absl::StatusOr<FallbackConfig> FindFallback(absl::string_view name);

// The session of `run`: its layers are those of the model.
SessionSpec MakeSessionSpec(const Run& run, absl::string_view name);

}  // namespace precondor::digits

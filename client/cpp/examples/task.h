// SPDX-License-Identifier: Apache-2.0
// What there is to train and with which method: the rows of the example's table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "client/cpp/examples/mlp.h"
#include "kernels/base/session_spec.h"
#include "precondor/optimizer.h"

namespace precondor::digits {

// How a task is compared: over-fitting limits the classifier's held-out loss, so its training loss is what counts.
enum class Criterion : uint8_t { kHeldOutLoss, kTrainingLoss };

struct Task {
  std::string name;  // "classifier", "autoencoder"
  MlpSpec model;
  int64_t steps = 0;
  Criterion criterion = Criterion::kHeldOutLoss;
};

// A method with the statistics it is fed.
struct MethodVariant {
  std::string name;            // of the command line: "none", "signed-lowrank" ...
  std::string method;          // of the table: "none", "mkor EXACT_DAMPED" ...
  std::string statistics;      // "none", "MEAN", "SIGNED"
  std::string representation;  // "none", "dense", "low_rank"
  MethodConfig config;
  StatisticsKind kind = StatisticsKind::kMean;
  std::string fallback = "never";  // to first order, as FindFallback takes it
  std::string optimizer = {};      // the base optimizer that it takes whatever is asked for; empty: any
};

inline constexpr int64_t kBatchSize = 128;
inline constexpr int64_t kLowRank = 16;

std::vector<Task> AllTasks();
std::vector<MethodVariant> AllMethods();

// NotFound lists the known names.
absl::StatusOr<Task> FindTask(absl::string_view name);
absl::StatusOr<MethodVariant> FindMethod(absl::string_view name);
// "never", "loss-rate", "cost-aware" or "at-step:N": the session's fallback policy, with settings for a job of a few
// hundred steps (docs/digits.md).
absl::StatusOr<FallbackConfig> FindFallback(absl::string_view name);
// "sgd", "nesterov", "plain" (SGD without momentum), "adamw", "lamb", each with the settings the example uses.
absl::StatusOr<OptimizerConfig> FindOptimizer(absl::string_view name);

// One training run: everything that its trajectory is a function of.
struct Run {
  Task task;
  MethodVariant method;
  std::string optimizer = "adamw";
  ExchangeMode exchange = ExchangeMode::kDirect;
  int32_t workers = 4;
  uint64_t seed = 1;
  double learning_rate = 0;  // at the first step; falls linearly to zero
  ShardLossPolicy on_shard_loss = ShardLossPolicy::kWait;
};

// The session that `run` needs, whose method's fallback is known. SIGNED has ceil(16 / workers) sketches a worker.
SessionSpec MakeSessionSpec(const Run& run, absl::string_view name);

}  // namespace precondor::digits

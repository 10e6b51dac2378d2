// SPDX-License-Identifier: Apache-2.0
// One training run, and the command line of digits_trainer that describes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"
#include "tests/e2e/trainer/mlp.h"
#include "tests/e2e/trainer/optimizer.h"

namespace precondor::digits {

inline constexpr int64_t kBatchSize = 128;

// Everything that the course of the training is a function of.
struct Run {
  Run() { session.seed = 1, session.world_size = 4; }
  std::string task;
  MlpSpec model;
  int64_t steps = 0;
  // The session of the service: method, statistics, exchange mode, layers, number of workers. Its seed is that of
  // weights and batches too. Method "identity" averages the gradients and leaves the rest to the base optimizer.
  SessionSpec session;
  std::string optimizer = "adamw";
  double learning_rate = 0.016;  // at the first step; falls linearly to zero
};

struct Options {
  Run run;
  int64_t steps = 0;        // 0: the task's own; ParseOptions has put them into `run`
  std::string coordinator;  // host:port
  std::string data_path;
  std::string csv_path;
};

// Makes `run` one of the task "classifier" or "autoencoder", whose model is the session's layers. False for other
// names.
bool SetTask(absl::string_view name, Run& run);

// Flags are --name=value or --name value. InvalidArgument names the flag, what was expected and what came.
absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments, absl::string_view default_data_path);

}  // namespace precondor::digits

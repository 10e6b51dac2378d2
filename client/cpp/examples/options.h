// SPDX-License-Identifier: Apache-2.0
// The command line of precondor-digits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "client/cpp/examples/task.h"
#include "kernels/base/session_spec.h"

namespace precondor::digits {

struct Options {
  bool help = false;
  bool in_process = false;
  std::string coordinator;  // host:port
  int shards = 1;
  std::string data_path;
  std::vector<Task> tasks;
  std::vector<MethodVariant> methods;
  std::string fallback;  // of all methods that precondition; empty: each one's own
  std::vector<std::string> optimizers;
  ExchangeMode exchange = ExchangeMode::kDirect;
  ShardLossPolicy on_shard_loss = ShardLossPolicy::kWait;
  int32_t workers = 4;
  int64_t seeds = 5;
  int64_t rate_seeds = 3;
  std::vector<double> learning_rates;  // a grid to search, or one rate for all
  int64_t steps = 0;                   // 0: each task's own
  int32_t worker_restarts = 0;
  std::string checkpoint_dir;
  std::string json_path;
  std::string svg_path;
  // Of a worker process; the parent passes them to itself.
  int32_t worker_rank = -1;
  int reducer_fd = -1;
};

// Flags are --name=value or --name value. InvalidArgument names the flag, what was expected and what came.
absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments, absl::string_view default_data_path);

// What --help prints.
std::string HelpText();

}  // namespace precondor::digits

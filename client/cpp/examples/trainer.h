// SPDX-License-Identifier: Apache-2.0
// The step loop, one for every way to precondition.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/examples/digits_data.h"
#include "client/cpp/examples/exchange.h"
#include "client/cpp/examples/host_matrix.h"
#include "client/cpp/examples/task.h"

namespace precondor::digits {

struct CurvePoint {
  int64_t step = 0;  // steps done
  double held_out_loss = 0;
  double held_out_accuracy = 0;  // classifier
  double training_loss = 0;      // over all training examples; classifier
};

struct TrainResult {
  std::vector<CurvePoint> curve;  // every kEvaluateEvery steps, and the end
  std::vector<HostMatrix> weights;
  int64_t skipped_steps = 0;
  double seconds = 0;  // of the steps, without the evaluations
};

// A run before its step `step`.
struct TrainState {
  int64_t step = 0;
  std::string optimizer;  // Optimizer::SaveState
  TrainResult so_far;     // with the weights
};

inline constexpr int64_t kEvaluateEvery = 10;

struct TrainOptions {
  // Replicas are equal, so one process of a job evaluates; the others leave it out and wait at the next step.
  bool evaluate = true;
  std::function<void(const CurvePoint&)> progress;  // after each evaluation; may be empty
  // Before each step; `seconds` of the steps so far. May be empty.
  std::function<void(uint64_t step, double seconds)> before_step;
  // Before anything of a step is sent, so that a process that goes on from it repeats what its predecessor sent. May be
  // empty.
  std::function<absl::Status(const TrainState&)> checkpoint;
  const TrainState* resume = nullptr;  // where to go on; null: at the beginning
};

// Trains from the initial weights of (run.task, run.seed): the batch of a step is BatchRows(..., run.seed, step), of
// which this process passes exchange.Rows() through its model. The learning rate is learning_rate (1 - step / steps).
absl::StatusOr<TrainResult> Train(const Run& run, const DigitsData& data, GradientExchange& exchange,
                                  const TrainOptions& options);

}  // namespace precondor::digits

// SPDX-License-Identifier: Apache-2.0
// The step loop. It does not know how gradients are preconditioned: a GradientExchange does that.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/examples/digits_data.h"
#include "client/cpp/examples/host_matrix.h"
#include "client/cpp/examples/mlp.h"
#include "client/cpp/examples/run.h"

namespace precondor::digits {

struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;
};

// Rows of a batch that worker `rank` of `workers` computes: [rank B / W, (rank + 1) B / W). Seven workers get uneven
// parts of a batch of 128. Needs batch_size >= workers.
inline RowRange RowsOfRank(int64_t batch_size, int64_t workers, int64_t rank) {
  const int64_t begin = rank * batch_size / workers;
  return RowRange{begin, (rank + 1) * batch_size / workers - begin};
}

// How one worker turns its gradients into preconditioned ones. One thread at a time; steps come in order, and within a
// step LayerReady for every layer in any order, then Finish.
class GradientExchange {
 public:
  virtual ~GradientExchange() = default;

  // Rows of the batch that this worker passes through its model.
  virtual RowRange Rows(int64_t batch_size) const = 0;

  // Takes a layer's rows and gradient. The tap's memory stays valid, and its gradient is not read, until Finish
  // returns.
  virtual absl::Status LayerReady(uint64_t step, const LayerTap& tap) = 0;

  // Waits until every gradient of the step is replaced by the preconditioned average over all workers. False when no
  // worker may apply the step. `loss` is the mean over this worker's rows.
  virtual absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) = 0;
};

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

// A run before its step `step`: what a process needs to go on bitwise.
struct TrainState {
  int64_t step = 0;
  std::string optimizer;  // Optimizer::SaveState
  std::vector<HostMatrix> weights;
};

inline constexpr int64_t kEvaluateEvery = 10;

// All functions may be empty.
struct TrainOptions {
  bool evaluate = true;                                  // replicas are equal, so one worker of a job evaluates
  std::function<void(const CurvePoint&)> progress = {};  // after each evaluation
  std::function<void(uint64_t step, double seconds)> before_step = {};  // `seconds` of the steps so far
  // Before anything of a step is sent, so that a process that goes on from the state repeats what its predecessor sent.
  std::function<absl::Status(const TrainState&)> checkpoint = {};
  const TrainState* resume = nullptr;  // where to go on; null: at the beginning
};

// Trains from the initial weights of (run.task, run.seed): the batch of a step is BatchRows(..., run.seed, step), of
// which this worker passes exchange.Rows() through its model. The learning rate is learning_rate (1 - step / steps).
absl::StatusOr<TrainResult> Train(const Run& run, const DigitsData& data, GradientExchange& exchange,
                                  const TrainOptions& options);

// FNV-1a of the weights' bits: equal replicas have equal hashes.
uint64_t HashWeights(const std::vector<HostMatrix>& weights);

// Writes the whole file or nothing, whenever the process is killed. Unavailable names the path.
absl::Status WriteCheckpoint(const std::string& path, const TrainState& state);
// False when there is no file. DataLoss when the file is damaged or its weights are not those of `model`.
absl::StatusOr<bool> ReadCheckpoint(const std::string& path, const MlpSpec& model, TrainState& state);

}  // namespace precondor::digits

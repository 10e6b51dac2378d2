// SPDX-License-Identifier: Apache-2.0
// A training run, and one worker's steps of it: alone, or through the service.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"
#include "precondor/client.h"
#include "tests/e2e/trainer/model.h"

namespace precondor::digits {

// A weight matrix whose last column is the bias, and its preconditioned gradient. Both are contiguous.
struct Parameter {
  MatrixView weight;
  ConstMatrixView gradient;
};

// The state is stored by the parameter's index in the list, so the list must have one order in all steps.
class Optimizer {
 public:
  // adamw, sgd, or plain, which is sgd without momentum.
  static absl::StatusOr<Optimizer> Make(absl::string_view name);

  void Step(absl::Span<const Parameter> parameters, double learning_rate);

  // All that the next step depends on except the weights.
  std::string SaveState() const;
  absl::Status LoadState(absl::string_view state);

 private:
  explicit Optimizer(absl::string_view name) : name_(name) {}

  std::string name_;
  int64_t step_ = 0;                         // number of the update in progress, from 1
  std::vector<std::vector<float>> moments_;  // of each parameter: the first ones, then the second ones
};

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

// Trains from the initial weights of (run.model, seed): the batch of a step is BatchRows(..., seed, step), of which
// this worker passes exchange.Rows() through its model. The learning rate is learning_rate (1 - step / steps).
class Trainer {
 public:
  // `run` and `data` outlive the trainer.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(const Run& run, const DigitsData& data);

  int64_t step() const { return step_; }  // the next one
  bool done() const { return step_ >= run_.steps; }
  int64_t skipped_steps() const { return skipped_steps_; }
  absl::Status Step(GradientExchange& exchange);

  Mlp& model() { return model_; }
  Optimizer& optimizer() { return optimizer_; }
  // Goes on with `step`. The caller has put back the model's weights and the optimizer's state of that step.
  void GoOnFrom(int64_t step) { step_ = step; }

 private:
  Trainer(const Run& run, const DigitsData& data, Optimizer optimizer);

  const Run& run_;
  const DigitsData& data_;
  Optimizer optimizer_;
  Mlp model_;
  int64_t step_ = 0;
  int64_t skipped_steps_ = 0;
};

// FNV-1a of the weights' bits: equal replicas have equal hashes.
uint64_t HashWeights(const std::vector<HostMatrix>& weights);

// All ranks make the same calls in the same order, one thread each; every call waits for all ranks. Matrices are
// contiguous, and have one shape on all ranks.
class RankReducer {
 public:
  explicit RankReducer(int32_t ranks) : slots_(static_cast<size_t>(ranks)), weights_(slots_.size()), barrier_(ranks) {}

  // matrix = sum_i weight_i matrix_i / sum_i weight_i over the ranks, in f64 and in rank order: all ranks get equal
  // bits.
  void WeightedMean(int32_t rank, double weight, MatrixView matrix) {
    slots_[static_cast<size_t>(rank)].assign(matrix.data, matrix.data + matrix.size());
    weights_[static_cast<size_t>(rank)] = weight;
    barrier_.arrive_and_wait();
    double total = 0;
    for (const double one : weights_) total += one;
    for (int64_t i = 0; i < matrix.size(); ++i) {
      double sum = 0;
      for (size_t r = 0; r < slots_.size(); ++r) {
        sum += weights_[r] * static_cast<double>(slots_[r][static_cast<size_t>(i)]);
      }
      matrix.data[i] = static_cast<float>(sum / total);
    }
    barrier_.arrive_and_wait();  // no rank fills its slot again before all have read it
  }

  // matrix = the matrix of rank `root`.
  void Broadcast(int32_t rank, int32_t root, MatrixView matrix) {
    std::vector<float>& slot = slots_[static_cast<size_t>(root)];
    if (rank == root) slot.assign(matrix.data, matrix.data + matrix.size());
    barrier_.arrive_and_wait();
    if (rank != root) std::copy(slot.begin(), slot.end(), matrix.data);
    barrier_.arrive_and_wait();
  }

 private:
  std::vector<std::vector<float>> slots_;  // of each rank
  std::vector<double> weights_;
  std::barrier<> barrier_;
};

// DIRECT: every worker sends its gradient and the shard averages them. DELEGATE: `reducer` averages, one worker for
// each layer sends the average, and `reducer` passes the answer on. REPLAY and PULL_FACTORS: `reducer` averages, and
// each worker preconditions the average itself. With a reducer LayerReady has one order on all ranks.
class ServiceExchange final : public GradientExchange {
 public:
  // `worker` and `reducer` outlive the exchange; `reducer` may be null in DIRECT.
  ServiceExchange(Worker& worker, RankReducer* reducer) : worker_(worker), reducer_(reducer) {}

  RowRange Rows(int64_t batch_size) const override;
  absl::Status LayerReady(uint64_t step, const LayerTap& tap) override;
  absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) override;

 private:
  struct Pending {
    int64_t layer = 0;
    MatrixView gradient;
    PreconditionFuture future;  // where this rank sends the layer
  };

  absl::Status SendStatistics(uint64_t step, const LayerTap& tap);
  // Passes the delegates' answers, and whether one of them was to skip, to all ranks.
  bool ShareAnswers(bool apply);

  Worker& worker_;
  RankReducer* const reducer_;
  std::vector<Pending> pending_;              // of the current step
  uint64_t samples_ = 0;                      // rows of the current step
  std::map<int64_t, uint64_t> lost_updates_;  // WorkerStatus::lost_updates of the last step
};

}  // namespace precondor::digits

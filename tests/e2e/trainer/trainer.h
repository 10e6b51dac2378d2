// SPDX-License-Identifier: Apache-2.0
// One worker's model and its steps. It does not know how gradients are preconditioned: a GradientExchange does that.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "tests/e2e/trainer/digits_data.h"
#include "tests/e2e/trainer/mlp.h"
#include "tests/e2e/trainer/optimizer.h"
#include "tests/e2e/trainer/options.h"

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

}  // namespace precondor::digits

// SPDX-License-Identifier: Apache-2.0
// How a training process turns its gradients into preconditioned ones: by itself, or through the service.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/examples/mlp.h"

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

// One training process's view of the exchange. One thread at a time; steps come in order, and within a step
// LayerReady for every layer in any order, then Finish.
class GradientExchange {
 public:
  virtual ~GradientExchange() = default;

  // Rows of the batch that this process passes through its model.
  virtual RowRange Rows(int64_t batch_size) const = 0;

  // Takes a layer's rows and gradient. The tap's memory stays valid, and its gradient is not read, until Finish is
  // done.
  virtual absl::Status LayerReady(uint64_t step, const LayerTap& tap) = 0;

  // Waits until every gradient handed in has been replaced by the preconditioned average over all workers. False when
  // no process may apply the step. `loss` is the mean over this process's rows.
  virtual absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) = 0;
};

}  // namespace precondor::digits

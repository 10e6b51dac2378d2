// SPDX-License-Identifier: Apache-2.0
// One worker's exchange through the service: statistics and gradients leave layer by layer during the backward pass.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "precondor/client.h"
#include "tests/e2e/trainer/rank_reducer.h"
#include "tests/e2e/trainer/trainer.h"

namespace precondor::digits {

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

// SPDX-License-Identifier: Apache-2.0
// One worker's exchange through the service: statistics and gradients leave layer by layer during the backward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/examples/exchange.h"
#include "client/cpp/examples/shared_reducer.h"
#include "precondor/client.h"

namespace precondor::digits {

// DIRECT: every worker sends its gradient and the shard averages them. DELEGATE: `reducer` averages, one worker a layer
// sends, `reducer` passes the answer on; LayerReady must then come in the same order on all ranks.
class ServiceExchange final : public GradientExchange {
 public:
  // `worker` and `reducer` outlive the exchange; `reducer` may be null in DIRECT.
  static absl::StatusOr<std::unique_ptr<ServiceExchange>> Make(Worker& worker, SharedReducer* reducer);

  RowRange Rows(int64_t batch_size) const override;
  absl::Status LayerReady(uint64_t step, const LayerTap& tap) override;
  absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) override;

 private:
  struct Pending {
    int64_t layer = 0;
    MatrixView gradient;
    PreconditionFuture future;  // where this rank sends the layer
    bool sent = false;
  };

  ServiceExchange(Worker& worker, SharedReducer* reducer) : worker_(worker), reducer_(reducer) {}
  absl::Status SendStatistics(uint64_t step, const LayerTap& tap);
  // Passes the delegates' answers, and whether one of them was to skip, to all ranks.
  absl::StatusOr<bool> ShareAnswers(bool apply);

  Worker& worker_;
  SharedReducer* const reducer_;
  std::vector<Pending> pending_;  // of the current step
  uint64_t samples_ = 0;          // rows of the current step
};

}  // namespace precondor::digits

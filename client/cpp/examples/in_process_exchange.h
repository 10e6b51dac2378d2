// SPDX-License-Identifier: Apache-2.0
// The whole job in one process: one pass over the whole batch, statistics formed as `world_size` workers would have
// sent them, and the method called directly. What training through the service is compared with.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/examples/exchange.h"
#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "precondor/statistics.h"

namespace precondor::digits {

class InProcessExchange final : public GradientExchange {
 public:
  // `backend` outlives the exchange.
  static absl::StatusOr<std::unique_ptr<InProcessExchange>> Make(SessionSpec spec, Backend& backend);

  RowRange Rows(int64_t batch_size) const override { return RowRange{0, batch_size}; }
  absl::Status LayerReady(uint64_t step, const LayerTap& tap) override;
  absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) override { return true; }

 private:
  InProcessExchange(SessionSpec spec, Backend& backend) : spec_(std::move(spec)), backend_(backend) {}

  const SessionSpec spec_;
  Backend& backend_;
  std::vector<std::unique_ptr<LayerState>> states_;
};

// The statistics of one side of a sealed statistic step, from the rows of the whole batch: each rank's vectors [k, d]
// of its own rows, rounded to the session's dtype as on the wire, then merged as a shard does. MEAN: the mean weighted
// by row counts, k = 1. Otherwise all of them in rank order, rank i's scaled by sqrt(W n_i / N), so that (1/k) sum v v'
// weighs every row alike. COVARIANCE: as one rank of the whole
// batch would send it. `key.rank` is ignored; row_scale as in ComputeStatistics.
absl::StatusOr<HostMatrix> MergedStatistics(const SessionSpec& spec, SketchKey key, ConstMatrixView rows,
                                            double row_scale);

}  // namespace precondor::digits

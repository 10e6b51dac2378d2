// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/service_exchange.h"

#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/session_spec.h"
#include "kernels/base/status_macros.h"
#include "precondor/statistics.h"
#include "tests/e2e/trainer/host_matrix.h"

namespace precondor::digits {

RowRange ServiceExchange::Rows(int64_t batch_size) const {
  return RowsOfRank(batch_size, worker_.session().spec.world_size, worker_.session().rank);
}

absl::Status ServiceExchange::SendStatistics(uint64_t step, const LayerTap& tap) {
  const SessionSpec& spec = worker_.session().spec;
  // One side's statistics. The output gradients are those of a mean over the rows: row_scale undoes its division.
  const auto statistics = [&](Side side, ConstMatrixView rows, double row_scale) -> absl::StatusOr<HostMatrix> {
    const StatisticsShape shape = ShapeOfStatistics(spec, tap.layer, rows.cols, rows.rows);
    HostMatrix out(shape.rows, shape.cols);
    const SketchKey key{spec.seed, step, static_cast<uint32_t>(tap.layer), side, worker_.session().rank};
    PRECONDOR_RETURN_IF_ERROR(ComputeStatistics(spec, key, rows, row_scale, out.view()));
    return out;
  };
  PRECONDOR_ASSIGN_OR_RETURN(const HostMatrix a, statistics(Side::kInput, tap.inputs, 1.0));
  PRECONDOR_ASSIGN_OR_RETURN(const HostMatrix g, statistics(Side::kOutput, tap.output_gradients,
                                                            static_cast<double>(tap.output_gradients.rows)));
  return worker_.SendStatistics(step, tap.layer, a.view(), g.view(), samples_);
}

absl::Status ServiceExchange::LayerReady(uint64_t step, const LayerTap& tap) {
  samples_ = static_cast<uint64_t>(tap.inputs.rows);
  if (worker_.NeedsStatistics(step, tap.layer)) PRECONDOR_RETURN_IF_ERROR(SendStatistics(step, tap));
  if (worker_.session().spec.exchange != ExchangeMode::kDirect) {
    reducer_->WeightedMean(static_cast<int32_t>(worker_.session().rank), static_cast<double>(samples_), tap.gradient);
  }
  Pending pending{tap.layer, tap.gradient, PreconditionFuture()};
  // The answer is written to the gradient's own memory.
  if (worker_.SendsGradient(tap.layer)) {
    pending.future = worker_.Precondition(step, tap.layer, {tap.gradient, tap.gradient}, samples_);
  }
  pending_.push_back(std::move(pending));
  return absl::OkStatus();
}

bool ServiceExchange::ShareAnswers(bool apply) {
  const auto rank = static_cast<int32_t>(worker_.session().rank);
  for (const Pending& pending : pending_) {
    reducer_->Broadcast(rank, DelegateRank(worker_.session().spec, pending.layer), pending.gradient);
  }
  float skipped_share = apply ? 0.0f : 1.0f;
  reducer_->WeightedMean(rank, 1.0, MatrixView(&skipped_share, 1, 1));
  return skipped_share == 0.0f;
}

absl::StatusOr<bool> ServiceExchange::Finish(uint64_t step, double loss, double learning_rate) {
  bool apply = true;
  for (const Pending& pending : pending_) {
    if (!worker_.SendsGradient(pending.layer)) continue;
    PRECONDOR_ASSIGN_OR_RETURN(const Preconditioned answer, pending.future.Wait());
    if (answer.decision == Decision::kSkip) apply = false;
  }
  if (worker_.session().spec.exchange == ExchangeMode::kDelegate) apply = ShareAnswers(apply);
  pending_.clear();
  PRECONDOR_RETURN_IF_ERROR(worker_.ReportStep(step, loss, samples_, true, learning_rate).Wait().status());
  for (const auto& [layer, updates] : worker_.status().lost_updates) {
    const uint64_t before = std::exchange(lost_updates_[layer], updates);
    if (updates == before) continue;
    std::cerr << absl::StrCat("training: rank ", worker_.session().rank, " step ", step, ": a shard has lost ",
                              updates - before, " updates of layer ", layer, "; training goes on with older factors\n");
  }
  return apply;
}

}  // namespace precondor::digits

// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/step_progress.h"

#include <algorithm>

#include "server/core/coordinator/step_leases.h"

namespace precondor {

StepProgress::StepProgress(int64_t world_size, uint64_t lease_steps, bool begun)
    : lease_steps_(lease_steps), losses_(world_size, lease_steps + 1), begun_(begun) {}

std::optional<FinishedStep> StepProgress::Report(const StepReport& report, absl::Time now) {
  begun_ = true;
  const std::optional<LossTable::StepLoss> finished =
      losses_.Add(report.rank, report.step, report.loss, report.samples, report.finite, report.learning_rate);
  if (!finished.has_value()) return std::nullopt;
  const bool next_in_line = finished->step == last_step_ + 1 && last_finished_ != absl::InfinitePast();
  const double seconds = next_in_line ? absl::ToDoubleSeconds(now - last_finished_) : 0.0;
  last_finished_ = now;
  last_step_ = std::max(last_step_, finished->step);
  if (finished->finite > 0) last_loss_ = finished->loss;
  return FinishedStep{.loss = *finished, .seconds = seconds};
}

void StepProgress::BeginEpoch() {
  losses_.Clear();
  last_step_ = 0;
  last_finished_ = absl::InfinitePast();
  shard_steps_.clear();
}

bool StepProgress::HasPassed(uint64_t step) const { return last_step_ >= StepSum(step, lease_steps_); }

}  // namespace precondor

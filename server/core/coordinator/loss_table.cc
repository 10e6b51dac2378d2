// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/loss_table.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace precondor {

std::optional<LossTable::StepLoss> LossTable::Add(uint32_t rank, uint64_t step, double loss, uint64_t samples,
                                                  bool finite, double learning_rate) {
  if (step < kept_from_) return std::nullopt;
  Step& entry = steps_[step];
  if (entry.arrived == world_size_) return std::nullopt;
  if (entry.reports.empty()) entry.reports.resize(world_size_);
  Report& report = entry.reports[rank];
  if (report.in) return std::nullopt;
  report = {.in = true,
            .finite = finite && std::isfinite(loss) && samples > 0,
            .loss = loss,
            .samples = samples,
            .learning_rate = learning_rate};
  std::optional<StepLoss> finished;
  if (++entry.arrived == world_size_) {
    finished = Average(step, entry);
    entry.reports = std::vector<Report>();
  }
  if (steps_.size() > max_steps_) {
    kept_from_ = steps_.begin()->first + 1;
    steps_.erase(steps_.begin());
  }
  return finished;
}

LossTable::StepLoss LossTable::Average(uint64_t step, const Step& entry) {
  StepLoss average{.step = step};
  double sum = 0;
  for (const Report& report : entry.reports) {
    if (std::isfinite(report.learning_rate))
      average.learning_rate = std::max(average.learning_rate, report.learning_rate);
    if (!report.finite) continue;
    sum += static_cast<double>(report.samples) * report.loss;
    average.samples += report.samples;
    ++average.finite;
  }
  average.loss =
      average.finite > 0 ? sum / static_cast<double>(average.samples) : std::numeric_limits<double>::quiet_NaN();
  return average;
}

void LossTable::Clear() {
  steps_.clear();
  kept_from_ = 0;
}

}  // namespace precondor

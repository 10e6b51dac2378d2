// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/step_progress.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "server/core/coordinator/step_leases.h"

namespace precondor {

std::optional<LossTable::StepLoss> LossTable::Add(uint32_t rank, uint64_t step, double loss, uint64_t samples,
                                                  bool finite, double learning_rate) {
  if (step < kept_from_) return std::nullopt;
  Step& entry = steps_[step];
  if (entry.finished) return std::nullopt;
  entry.in.resize(static_cast<size_t>(world_size_));
  if (entry.in[rank]) return std::nullopt;
  entry.in[rank] = true;
  entry.reports.push_back({.rank = rank,
                           .finite = finite && std::isfinite(loss) && samples > 0,
                           .loss = loss,
                           .samples = samples,
                           .learning_rate = learning_rate});
  ++kept_reports_;
  std::optional<StepLoss> finished;
  if (static_cast<int64_t>(entry.reports.size()) == world_size_) {
    finished = Average(step, entry);
    kept_reports_ -= world_size_;
    entry = Step{.reports = {}, .in = {}, .finished = true};
  }
  while (steps_.size() > max_steps_ || kept_reports_ > most_reports_) {
    kept_from_ = steps_.begin()->first + 1;
    kept_reports_ -= static_cast<int64_t>(steps_.begin()->second.reports.size());
    steps_.erase(steps_.begin());
  }
  return finished;
}

LossTable::StepLoss LossTable::Average(uint64_t step, Step& entry) {
  std::sort(entry.reports.begin(), entry.reports.end(),
            [](const Report& x, const Report& y) { return x.rank < y.rank; });
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
  kept_reports_ = 0;
  kept_from_ = 0;
}

StepProgress::StepProgress(int64_t world_size, uint64_t lease_steps, bool begun)
    : lease_steps_(lease_steps), losses_(world_size, lease_steps + 1), begun_(begun) {}

std::optional<FinishedStep> StepProgress::Report(const StepReport& report, absl::Time now) {
  begun_ = true;
  const std::optional<LossTable::StepLoss> finished =
      losses_.Add(report.rank, report.step, report.loss, report.samples, report.finite, report.learning_rate);
  if (!finished.has_value()) return std::nullopt;
  const bool next_in_line = finished->step == last_step_ + 1 && last_finished_ != absl::InfinitePast();
  now = std::max(now, last_finished_);  // a report that is sent again tells too late a time
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

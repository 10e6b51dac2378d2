// SPDX-License-Identifier: Apache-2.0
#include "server/policy/loss_trend.h"

#include <algorithm>
#include <cmath>

namespace precondor {
namespace {

// Tolerance for rounding in a schedule computed in f64. A warm-up of fewer than 1e9 steps rises by more than this per
// step.
constexpr double kRising = 1e-9;

bool BeginsPhase(const FallbackConfig& config, double before, double now) {
  if (before == 0) return false;  // the first known learning rate
  return now > before * (1 + kRising) || std::abs(now - before) > config.lr_jump * std::max(now, before);
}

}  // namespace

std::optional<LossTrend> AdvanceTrend(const FallbackConfig& config, const LossTrend& trend, uint64_t step, double loss,
                                      double learning_rate) {
  LossTrend next = trend;
  if (trend.started) {
    next.loss = kLossDecay * trend.loss + (1 - kLossDecay) * loss;
    next.rate = config.rate_decay * trend.rate + (1 - config.rate_decay) * (trend.loss - next.loss);
    ++next.phase_steps;
  } else {
    next.started = true;
    next.loss = loss;
    next = BeginPhase(next, step);
  }
  if (std::isfinite(learning_rate) && learning_rate > 0) {
    if (BeginsPhase(config, trend.learning_rate, learning_rate)) next = BeginPhase(next, step);
    next.learning_rate = learning_rate;
  }
  const bool finite = std::isfinite(next.loss) && std::isfinite(next.rate) && std::isfinite(PhaseDecrease(next));
  return finite ? std::make_optional(next) : std::nullopt;
}

LossTrend BeginPhase(const LossTrend& trend, uint64_t step) {
  LossTrend next = trend;
  next.phase_step = step;
  next.phase_loss = trend.loss;
  next.phase_steps = 0;
  return next;
}

double PhaseDecrease(const LossTrend& trend) { return trend.phase_loss - trend.loss; }

double PhaseMeanRate(const LossTrend& trend) {
  return trend.phase_steps == 0 ? 0 : PhaseDecrease(trend) / static_cast<double>(trend.phase_steps);
}

}  // namespace precondor

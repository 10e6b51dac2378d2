// SPDX-License-Identifier: Apache-2.0
#include "server/policy/cost_probe.h"

#include <cmath>

namespace precondor {
namespace {

void Enter(CostProbe& probe, ProbePhase phase) {
  probe.phase = phase;
  probe.steps = 0;
}

bool IsSettling(ProbePhase phase) { return phase == ProbePhase::kToFirstOrder || phase == ProbePhase::kToSecondOrder; }

LossWindow& WindowOf(CostProbe& probe) {
  if (probe.phase == ProbePhase::kBefore) return probe.before;
  return probe.phase == ProbePhase::kProbe ? probe.probe : probe.after;
}

void FinishRound(const FallbackConfig& config, CostProbe& probe) {
  probe.second_order_per_second = (DecreasePerSecond(probe.before) + DecreasePerSecond(probe.after)) / 2;
  probe.first_order_per_second = DecreasePerSecond(probe.probe);
  const double needed = probe.second_order_per_second + config.probe_margin * std::abs(probe.second_order_per_second);
  // If an overflow has made one of them NaN or both infinite, first order does not win.
  const bool won = probe.first_order_per_second > needed && std::isfinite(probe.first_order_per_second);
  probe.wins = won ? probe.wins + 1 : 0;
  ++probe.rounds;
  Enter(probe, ProbePhase::kWaiting);
}

}  // namespace

LossWindow ExtendWindow(const LossWindow& window, double loss, double seconds) {
  LossWindow next = window;
  if (window.steps == 0) next.first_loss = loss;
  next.loss_sum += loss - next.first_loss;
  next.indexed_loss_sum += static_cast<double>(window.steps) * (loss - next.first_loss);
  next.seconds += seconds;
  ++next.steps;
  return next;
}

double DecreasePerSecond(const LossWindow& window) {
  const double n = static_cast<double>(window.steps);
  const double covariance = window.indexed_loss_sum - (n - 1) / 2 * window.loss_sum;
  const double slope = covariance / (n * (n * n - 1) / 12);
  return -slope * n / window.seconds;
}

CostProbe AdvanceProbe(const FallbackConfig& config, const CostProbe& probe, const ProbeStep& step) {
  CostProbe next = probe;
  if (next.phase == ProbePhase::kWaiting) {
    ++next.steps;
    if (step.may_begin && next.steps >= config.probe_interval_steps) {
      next.before = next.probe = next.after = LossWindow();
      Enter(next, ProbePhase::kBefore);
    }
    return next;
  }
  if (IsSettling(next.phase)) {
    if (step.mode != ProbeMode(next.phase)) return next;  // this step was granted before the change
    if (next.steps < config.probe_settle_steps) {
      ++next.steps;
      return next;
    }
    Enter(next, next.phase == ProbePhase::kToFirstOrder ? ProbePhase::kProbe : ProbePhase::kAfter);
  }
  const bool timed = std::isfinite(step.seconds) && step.seconds > 0;
  if (!timed) ++next.steps;
  if (step.mode != ProbeMode(next.phase) || next.steps >= config.probe_steps) {
    Enter(next, ProbePhase::kWaiting);
    return next;
  }
  if (!timed) return next;
  LossWindow& window = WindowOf(next);
  window = ExtendWindow(window, step.loss, step.seconds);
  if (window.steps < config.probe_steps) return next;
  if (next.phase == ProbePhase::kAfter) {
    FinishRound(config, next);
  } else {
    Enter(next, next.phase == ProbePhase::kBefore ? ProbePhase::kToFirstOrder : ProbePhase::kToSecondOrder);
  }
  return next;
}

CostProbe RestartProbe(const CostProbe& probe) {
  CostProbe next = probe;
  next.wins = 0;
  Enter(next, ProbePhase::kWaiting);
  return next;
}

Mode ProbeMode(ProbePhase phase) {
  return phase == ProbePhase::kToFirstOrder || phase == ProbePhase::kProbe ? Mode::kFirstOrder : Mode::kSecondOrder;
}

absl::string_view ProbePhaseName(ProbePhase phase) {
  switch (phase) {
    case ProbePhase::kWaiting:
      return "WAITING";
    case ProbePhase::kBefore:
      return "BEFORE";
    case ProbePhase::kToFirstOrder:
      return "TO_FIRST_ORDER";
    case ProbePhase::kProbe:
      return "PROBE";
    case ProbePhase::kToSecondOrder:
      return "TO_SECOND_ORDER";
    case ProbePhase::kAfter:
      return "AFTER";
  }
  return "UNKNOWN";
}

}  // namespace precondor

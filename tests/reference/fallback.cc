// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/fallback.h"

#include <cmath>

namespace precondor::reference {

Vector SmoothedLosses(const Vector& losses, double loss_decay) {
  Vector smoothed;
  for (size_t t = 0; t < losses.size(); ++t) {
    double sum = std::pow(loss_decay, static_cast<double>(t)) * losses[0];
    for (size_t k = 1; k <= t; ++k) {
      sum += (1 - loss_decay) * std::pow(loss_decay, static_cast<double>(t - k)) * losses[k];
    }
    smoothed.push_back(sum);
  }
  return smoothed;
}

Vector SmoothedRates(const Vector& smoothed_losses, double rate_decay) {
  Vector rates;
  for (size_t t = 0; t < smoothed_losses.size(); ++t) {
    double sum = 0;
    for (size_t k = 1; k <= t; ++k) {
      sum += (1 - rate_decay) * std::pow(rate_decay, static_cast<double>(t - k)) *
             (smoothed_losses[k - 1] - smoothed_losses[k]);
    }
    rates.push_back(sum);
  }
  return rates;
}

std::optional<uint64_t> LossRateSwitch(const Vector& losses, const LossRateRule& rule) {
  const Vector l = SmoothedLosses(losses, rule.loss_decay);
  const Vector r = SmoothedRates(l, rule.rate_decay);
  for (size_t t = rule.min_steps + rule.patience_steps - 1; t < losses.size(); ++t) {
    bool slow = true;
    for (size_t back = 0; back < rule.patience_steps; ++back) {
      const size_t u = t - back;
      slow = slow && r[u] < rule.beta * (l[0] - l[u]) / static_cast<double>(u);
    }
    if (slow) return t;
  }
  return std::nullopt;
}

}  // namespace precondor::reference

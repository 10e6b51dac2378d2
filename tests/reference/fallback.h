// SPDX-License-Identifier: Apache-2.0
// The formulas of docs/use/methods/mkor_h.md in f64 over whole histories, each sum written out. Quadratic and plain.
#pragma once

#include <cstdint>
#include <optional>

#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

// Smoothed losses l(t) = w^t x(0) + sum_k (1-w) w^(t-k) x(k).
Vector SmoothedLosses(const Vector& losses, double loss_decay);

// Their smoothed decrease r(t) = sum_k (1-w) w^(t-k) (l(k-1) - l(k)), r(0) = 0.
Vector SmoothedRates(const Vector& smoothed_losses, double rate_decay);

struct LossRateRule {
  double loss_decay = 0.95;
  double rate_decay = 0.99;
  double beta = 0.1;
  size_t min_steps = 200;
  size_t patience_steps = 50;
};

// First t whose last `patience_steps` steps, itself included, all have t' - t0 >= min_steps and
// r(t') < beta (l(t0) - l(t')) / (t' - t0). One phase: t0 = 0.
std::optional<uint64_t> LossRateSwitch(const Vector& losses, const LossRateRule& rule);

}  // namespace precondor::reference

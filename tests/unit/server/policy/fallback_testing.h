// SPDX-License-Identifier: Apache-2.0
// A training job under a fallback policy, as the coordinator would run it: decisions take effect beyond the lease.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numbers>
#include <vector>

#include "kernels/base/random.h"
#include "server/policy/fallback.h"

namespace precondor {

struct SimulatedJob {
  FallbackConfig config;
  uint64_t lease_steps = 16;
  // Loss of a step, after so many steps in each mode.
  std::function<double(uint64_t second_order_steps, uint64_t first_order_steps, uint64_t step)> loss = nullptr;
  std::function<double(uint64_t step)> learning_rate = [](uint64_t) { return 0.0; };
  double second_order_seconds = 1;
  double first_order_seconds = 1;

  FallbackState state = {};
  std::vector<ModeInterval> schedule = {{0, Mode::kSecondOrder}};
  std::vector<FallbackDecision> decisions = {};  // one a step
  std::vector<StepObservation> observations = {};

  void Run(uint64_t steps) {
    uint64_t counts[2] = {0, 0};
    const uint64_t begin = observations.size();
    for (uint64_t step = begin; step < begin + steps; ++step) {
      const Mode mode = ModeAt(schedule, step);
      ++counts[mode == Mode::kFirstOrder];
      observations.push_back({.step = step,
                              .loss = loss(counts[0], counts[1], step),
                              .learning_rate = learning_rate(step),
                              .seconds = mode == Mode::kSecondOrder ? second_order_seconds : first_order_seconds,
                              .mode = mode});
      state = Advance(config, state, observations.back());
      decisions.push_back(Decide(config, state));
      schedule = ApplyDecision(decisions.back(), schedule, step + lease_steps + 1);
    }
  }

  // Decisions with this reason.
  int64_t Count(FallbackReason reason) const {
    int64_t count = 0;
    for (const FallbackDecision& decision : decisions) count += decision.reason == reason;
    return count;
  }

  // Step of the first decision with this reason; the greatest number when there is none.
  uint64_t First(FallbackReason reason) const {
    for (size_t step = 0; step < decisions.size(); ++step) {
      if (decisions[step].reason == reason) return step;
    }
    return std::numeric_limits<uint64_t>::max();
  }
};

// Standard normal noise, a function of seed and step (Box-Muller).
inline double Noise(uint64_t seed, uint64_t step) {
  const CounterRandom random({seed});
  const double u = (static_cast<double>(random.Bits(2 * step) >> 11) + 0.5) * 0x1p-53;
  const double v = static_cast<double>(random.Bits(2 * step + 1) >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

}  // namespace precondor

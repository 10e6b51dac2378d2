// SPDX-License-Identifier: Apache-2.0
// Fallback policies on synthetic loss curves.
#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/policy/fallback.h"
#include "tests/reference/fallback.h"
#include "tests/unit/server/policy/fallback_testing.h"

namespace precondor {
namespace {

using testing::ElementsAre;

const auto kNan = std::numeric_limits<double>::quiet_NaN();

// 2 falling to 0.2 with time constant tau, noise of a fraction of itself.
auto Decay(double tau, double noise = 0, uint64_t seed = 0) {
  return [=](uint64_t, uint64_t, uint64_t step) {
    return (0.2 + 1.8 * std::exp(-static_cast<double>(step) / tau)) * (1 + noise * Noise(seed, step));
  };
}

FallbackConfig LossRate() { return {.policy = FallbackPolicy::kLossRate}; }

std::vector<double> Losses(const SimulatedJob& job) {
  std::vector<double> losses;
  for (const StepObservation& observation : job.observations) losses.push_back(observation.loss);
  return losses;
}

// On l = c + a e^-x, x = t / tau, the rule is x e^-x < beta (1 - e^-x): x = 3.61 for beta = .1. The smoothing lags by
// 20 + 100 steps, patience adds 50.
TEST(FallbackCurvesTest, ADecayToAPlateauSwitchesOnceWhereTheFormulaSays) {
  for (const double tau : {300.0, 1000.0}) {
    SimulatedJob job{.config = LossRate(), .loss = Decay(tau)};
    job.Run(static_cast<uint64_t>(8 * tau));
    const uint64_t step = job.First(FallbackReason::kLossRate);
    EXPECT_EQ(step, reference::LossRateSwitch(Losses(job), {}));
    EXPECT_GT(step, 3.61 * tau);
    EXPECT_LT(step, 3.61 * tau + 2 * (20 + 100) + 50);
    EXPECT_EQ(job.Count(FallbackReason::kLossRate), 1);
    EXPECT_THAT(job.schedule,
                ElementsAre(ModeInterval{0, Mode::kSecondOrder}, ModeInterval{step + 17, Mode::kFirstOrder}));
    EXPECT_EQ(job.state.switch_step, step);
  }
}

TEST(FallbackCurvesTest, ASteadyDecreaseNeverSwitches) {
  for (const double noise : {0.0, 0.1}) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      SimulatedJob job{.config = LossRate(), .loss = [&](uint64_t, uint64_t, uint64_t step) {
                         return (2 - static_cast<double>(step) / 2000) * (1 + noise * Noise(seed, step));
                       }};
      job.Run(2000);
      EXPECT_EQ(job.Count(FallbackReason::kLossRate), 0) << "noise " << noise << " seed " << seed;
      EXPECT_EQ(job.schedule.size(), 1u);
    }
  }
}

TEST(FallbackCurvesTest, NoiseOfATenthMovesTheSwitchAndDoesNotFlap) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    SimulatedJob job{.config = LossRate(), .loss = Decay(500, 0.1, seed)};
    job.Run(8000);
    EXPECT_EQ(job.schedule.size(), 2u) << "seed " << seed;
    const uint64_t step = job.First(FallbackReason::kLossRate);
    ASSERT_LT(step, 500u * 7) << "seed " << seed;
    std::vector<double> losses = Losses(job);
    losses.resize(step + 1);
    EXPECT_EQ(step, reference::LossRateSwitch(losses, {}));
    EXPECT_GT(step, 500u * 2) << "seed " << seed;  // e^-2: 87 % of the way
  }
}

TEST(FallbackCurvesTest, ALearningRateDropGivesTheNextPhaseItsChance) {
  // A plateau at 1.2 that a drop of the learning rate at step 1500 turns into a new decay.
  const auto loss = [](uint64_t, uint64_t, uint64_t step) {
    const double t = static_cast<double>(step);
    return step < 1500 ? 1.2 + std::exp(-t / 400) : 0.2 + std::exp(-(t - 1500) / 400);
  };
  SimulatedJob job{.config = LossRate(), .loss = loss};
  job.learning_rate = [](uint64_t step) { return step < 1500 ? 0.1 : 0.01; };
  job.Run(1500);
  ASSERT_EQ(job.schedule.size(), 1u) << "the curve has to be flat only just before the drop";
  job.Run(200);
  EXPECT_EQ(job.state.trend.phase_step, 1500u);
  EXPECT_EQ(job.decisions.back().reason, FallbackReason::kTooEarly);
  job.Run(4000);
  // t0 = 1500, so the formula's 3.61 tau count from there.
  EXPECT_GT(job.First(FallbackReason::kLossRate), 1500 + 3.3 * 400);
  EXPECT_LT(job.First(FallbackReason::kLossRate), 1500 + 3.61 * 400 + 290);
}

TEST(FallbackCurvesTest, NothingSwitchesWhileTheLearningRateRises) {
  SimulatedJob job{.config = LossRate(), .loss = [](uint64_t, uint64_t, uint64_t) { return 1.0; }};
  job.config.beta = 1;
  job.loss = [](uint64_t, uint64_t, uint64_t step) { return 1 + 1e-6 * static_cast<double>(step); };  // never better
  job.learning_rate = [](uint64_t step) { return 1e-3 * static_cast<double>(step < 1000 ? step : 1000); };
  job.Run(1000 + 150);
  EXPECT_EQ(job.Count(FallbackReason::kTooEarly), 1150);
  EXPECT_EQ(job.state.trend.phase_step, 1000u);
}

TEST(FallbackCurvesTest, NonFiniteAndSkippedStepsNeitherSwitchNorPoison) {
  SimulatedJob clean{.config = LossRate(), .loss = Decay(300)};
  clean.Run(2400);
  // The same losses with a bad step after each: the same decisions, one bad step later or none.
  FallbackState state;
  uint64_t step = 0;
  int bad = 0;
  for (size_t i = 0; i < clean.observations.size(); ++i) {
    StepObservation observation = clean.observations[i];
    observation.step = step++;
    state = Advance(clean.config, state, observation);
    const FallbackDecision good = Decide(clean.config, state);
    ASSERT_EQ(good.reason, clean.decisions[i].reason) << i;
    ASSERT_EQ(good.state.trend.rate, clean.decisions[i].state.trend.rate) << i;
    const double losses[] = {kNan, std::numeric_limits<double>::infinity(), 3.0};
    observation.step = step++;
    observation.loss = losses[i % 3];
    observation.learning_rate = 77;  // of a step that does not count
    observation.skipped = i % 3 == 2;
    state = Advance(clean.config, state, observation);
    ++bad;
    ASSERT_EQ(Decide(clean.config, state).mode, good.mode) << i;
  }
  EXPECT_EQ(state.uncounted_steps, static_cast<uint64_t>(bad));
  EXPECT_EQ(state.mode, Mode::kFirstOrder);
}

TEST(FallbackCurvesTest, ADivergedJobStaysWhereItWas) {
  SimulatedJob job{.config = LossRate(), .loss = [](uint64_t, uint64_t, uint64_t step) {
                     return step < 300 ? 2.0 - 1e-3 * static_cast<double>(step) : kNan;
                   }};
  job.Run(3000);
  EXPECT_EQ(job.schedule.size(), 1u);
  EXPECT_EQ(job.state.uncounted_steps, 2700u);
}

TEST(FallbackCurvesTest, AReplayGivesTheSameBits) {
  SimulatedJob job{.config = LossRate(), .loss = Decay(300, 0.1, 7)};
  job.second_order_seconds = 1.1;
  job.Run(6000);
  EXPECT_EQ(job.state.mode, Mode::kFirstOrder);
  FallbackState state;
  for (size_t i = 0; i < job.observations.size(); ++i) {
    state = Advance(job.config, state, job.observations[i]);
    ASSERT_EQ(Decide(job.config, state), job.decisions[i]) << i;
  }
  EXPECT_EQ(state, job.state);
}

}  // namespace
}  // namespace precondor

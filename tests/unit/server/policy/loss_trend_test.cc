// SPDX-License-Identifier: Apache-2.0
#include "server/policy/loss_trend.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

#include "tests/reference/fallback.h"

namespace precondor {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kLargest = std::numeric_limits<double>::max();

constexpr double kTrendRounding = 1e-13;

FallbackConfig Quarter() { return {.rate_decay = 0.75}; }

// Returns the trend after steps whose smoothed losses are `smoothed`, to within rounding.
LossTrend TrendAfter(const FallbackConfig& config, const std::vector<double>& smoothed,
                     const std::vector<double>& rates = {}) {
  LossTrend trend;
  for (size_t step = 0; step < smoothed.size(); ++step) {
    const double learning_rate = rates.empty() ? 0 : rates[step];
    const double loss = step == 0 ? smoothed[0] : trend.loss + (smoothed[step] - trend.loss) / (1 - kLossDecay);
    trend = AdvanceTrend(config, trend, step, loss, learning_rate).value_or(trend);
  }
  return trend;
}

TEST(LossTrendTest, FollowsTheFormulasByHand) {
  LossTrend trend = *AdvanceTrend(Quarter(), LossTrend(), 0, 8, 0);
  EXPECT_EQ(trend.loss, 8);
  EXPECT_EQ(trend.rate, 0);
  // l: .95 * 8 + .05 * 4 = 7.8, .95 * 7.8 + .05 * 0 = 7.41. r: .25 * .2 = .05, .75 * .05 + .25 * .39 = .135.
  trend = *AdvanceTrend(Quarter(), trend, 1, 4, 0);
  EXPECT_NEAR(trend.loss, 7.8, kTrendRounding);
  EXPECT_NEAR(trend.rate, 0.05, kTrendRounding);
  trend = *AdvanceTrend(Quarter(), trend, 2, 0, 0);
  EXPECT_NEAR(trend.loss, 7.41, kTrendRounding);
  EXPECT_NEAR(trend.rate, 0.135, kTrendRounding);
  EXPECT_EQ(trend.phase_step, 0u);
  EXPECT_EQ(trend.phase_steps, 2u);
  EXPECT_EQ(trend.phase_loss, 8);
  EXPECT_NEAR(PhaseDecrease(trend), 0.59, kTrendRounding);
  EXPECT_NEAR(PhaseMeanRate(trend), 0.295, kTrendRounding);
}

TEST(LossTrendTest, AgreesWithTheSumsWrittenOut) {
  std::vector<double> losses;
  for (int t = 0; t < 600; ++t) losses.push_back(1 + std::exp(-t / 150.0) + 0.2 * std::sin(0.7 * t * t));
  const std::vector<double> l = reference::SmoothedLosses(losses, 0.95);
  const std::vector<double> r = reference::SmoothedRates(l, 0.99);
  LossTrend trend;
  for (size_t t = 0; t < losses.size(); ++t) {
    trend = *AdvanceTrend({}, trend, t, losses[t], 0);
    // One rounding a step and term, each of at most epsilon times a loss below 2.2.
    const double tolerance = 2.2 * std::numeric_limits<double>::epsilon() * static_cast<double>(t + 1);
    ASSERT_NEAR(trend.loss, l[t], tolerance) << t;
    ASSERT_NEAR(trend.rate, r[t], tolerance) << t;
  }
}

TEST(LossTrendTest, OneStepHasNoMean) {
  const LossTrend trend = TrendAfter(Quarter(), {8});
  EXPECT_TRUE(trend.started);
  EXPECT_EQ(trend.rate, 0);
  EXPECT_EQ(PhaseMeanRate(trend), 0);
  EXPECT_EQ(PhaseMeanRate(LossTrend()), 0);
}

TEST(LossTrendTest, RefusesWhatIsNotFinite) {
  const LossTrend trend = TrendAfter(Quarter(), {8, 6, 3});
  for (const double loss : {kNaN, kInf, -kInf}) {
    EXPECT_FALSE(AdvanceTrend(Quarter(), trend, 3, loss, 0).has_value());
    EXPECT_FALSE(AdvanceTrend(Quarter(), LossTrend(), 0, loss, 0).has_value());
  }
  // Finite, but l(t0) - l would not be: l = (2 .95^t - 1) max, which is negative from t = 14 on.
  LossTrend falling = *AdvanceTrend(Quarter(), LossTrend(), 0, kLargest, 0);
  for (uint64_t step = 1; step < 14; ++step) falling = AdvanceTrend(Quarter(), falling, step, -kLargest, 0).value();
  EXPECT_FALSE(AdvanceTrend(Quarter(), falling, 14, -kLargest, 0).has_value());
}

TEST(LossTrendTest, APhaseBeginsWhereTheLearningRateChangesAtOnce) {
  const struct {
    const char* what;
    std::vector<double> rates;  // of steps 0, 1 ...
    uint64_t phase_step;
  } cases[] = {
      {"constant", {1, 1, 1, 1}, 0},
      {"unknown", {0, 0, 0, 0}, 0},
      {"not a number", {1, kNaN, kInf, -1}, 0},
      {"known from step 2", {0, 0, 1, 1}, 0},
      {"warm-up to step 2", {0.25, 0.5, 1, 1}, 2},
      {"slow warm-up to step 2", {1, 1.0001, 1.0002, 1.0002}, 2},
      {"warm-up, then decay", {0.5, 1, 0.95, 0.9}, 1},
      {"drop at step 3", {1, 1, 1, 0.5}, 3},
      {"drop behind an unknown rate", {1, 1, 0, 0.5}, 3},
      {"two drops", {1, 0.1, 0.1, 0.01}, 3},
      {"smooth decay", {1, 0.95, 0.9, 0.85}, 0},
      {"drop of exactly lr_jump is none", {1, 0.75, 0.75, 0.75}, 0},
      {"warm restart", {1, 0.95, 0.9, 1}, 3},
      {"rounding", {0.1, std::nextafter(0.1, 1), 0.1, std::nextafter(0.1, 1)}, 0},
  };
  for (const auto& c : cases) {
    FallbackConfig config = Quarter();
    if (c.rates[1] == 0.75) config.lr_jump = 0.25;
    const LossTrend trend = TrendAfter(config, {8, 6, 3, 1.5}, c.rates);
    EXPECT_EQ(trend.phase_step, c.phase_step) << c.what;
    EXPECT_EQ(trend.phase_steps, 3 - c.phase_step) << c.what;
    const double l[] = {8, 6, 3, 1.5};
    EXPECT_NEAR(trend.phase_loss, l[c.phase_step], kTrendRounding) << c.what;
    EXPECT_NEAR(trend.loss, 1.5, kTrendRounding) << c.what << ": a phase does not touch the smoothing";
  }
}

TEST(LossTrendTest, BeginPhaseForgetsNothingElse) {
  const LossTrend before = TrendAfter(Quarter(), {8, 6, 3});
  LossTrend expected = before;
  expected.phase_step = 9;
  expected.phase_steps = 0;
  expected.phase_loss = before.loss;
  EXPECT_EQ(BeginPhase(before, 9), expected);
}

}  // namespace
}  // namespace precondor

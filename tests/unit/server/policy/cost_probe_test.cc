// SPDX-License-Identifier: Apache-2.0
#include "server/policy/cost_probe.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

#include "tests/reference/fallback.h"

namespace precondor {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

FallbackConfig Small() {
  return {.probe_interval_steps = 3, .probe_settle_steps = 1, .probe_steps = 4, .probe_margin = 0.25, .probe_wins = 2};
}

ProbeStep Step(double loss, Mode mode, double seconds = 1) {
  return {.loss = loss, .seconds = seconds, .mode = mode, .may_begin = true};
}

// Runs a job whose loss falls by `second` or `first` a step, steps taking `second_seconds` or 1; modes as asked for,
// `delay` steps late. Stops after `rounds` or 1000 steps.
CostProbe RunRounds(const FallbackConfig& config, int64_t rounds, double second, double second_seconds, double first,
                    size_t delay = 0) {
  CostProbe probe;
  std::vector<Mode> asked(delay + 1, Mode::kSecondOrder);
  double loss = 1000;
  for (int step = 0; step < 1000 && probe.rounds < rounds; ++step) {
    const Mode mode = asked[asked.size() - 1 - delay];
    loss -= mode == Mode::kSecondOrder ? second : first;
    probe = AdvanceProbe(config, probe, Step(loss, mode, mode == Mode::kSecondOrder ? second_seconds : 1));
    asked.push_back(ProbeMode(probe.phase));
  }
  EXPECT_EQ(probe.rounds, rounds);
  return probe;
}

TEST(LossWindowTest, AgreesWithTheLeastSquaresLine) {
  std::vector<double> losses;
  LossWindow window;
  for (int i = 0; i < 100; ++i) {
    losses.push_back(5 - 0.01 * i + 0.3 * std::cos(1.3 * i));
    window = ExtendWindow(window, losses.back(), 0.25);
  }
  // n rounded sums of terms below n * 1.6.
  const double tolerance = 100 * 160 * std::numeric_limits<double>::epsilon();
  EXPECT_NEAR(DecreasePerSecond(window), reference::LeastSquaresDecreasePerSecond(losses, 25), tolerance);
}

TEST(LossWindowTest, OfALineIsItsSlopePerSecond) {
  LossWindow window;
  for (int i = 0; i < 4; ++i) window = ExtendWindow(window, 8 - 2.0 * i, 0.5);
  EXPECT_EQ(DecreasePerSecond(window), 4);
}

TEST(LossWindowTest, LosesNothingOnAGreatOffset) {
  LossWindow window;
  for (int i = 0; i < 64; ++i) window = ExtendWindow(window, 1e12 - i, 1);
  EXPECT_EQ(DecreasePerSecond(window), 1);
}

TEST(CostProbeTest, ARoundGoesThroughItsPhasesOnCountedSteps) {
  const FallbackConfig config = Small();
  const struct {
    Mode mode;
    ProbePhase after;
  } steps[] = {
      {Mode::kSecondOrder, ProbePhase::kWaiting},      {Mode::kSecondOrder, ProbePhase::kWaiting},
      {Mode::kSecondOrder, ProbePhase::kBefore},  // the interval of 3 is over
      {Mode::kSecondOrder, ProbePhase::kBefore},       {Mode::kSecondOrder, ProbePhase::kBefore},
      {Mode::kSecondOrder, ProbePhase::kBefore},       {Mode::kSecondOrder, ProbePhase::kToFirstOrder},
      {Mode::kSecondOrder, ProbePhase::kToFirstOrder},  // granted before
      {Mode::kSecondOrder, ProbePhase::kToFirstOrder}, {Mode::kFirstOrder, ProbePhase::kToFirstOrder},  // settles
      {Mode::kFirstOrder, ProbePhase::kProbe},         {Mode::kFirstOrder, ProbePhase::kProbe},
      {Mode::kFirstOrder, ProbePhase::kProbe},         {Mode::kFirstOrder, ProbePhase::kToSecondOrder},
      {Mode::kFirstOrder, ProbePhase::kToSecondOrder}, {Mode::kSecondOrder, ProbePhase::kToSecondOrder},
      {Mode::kSecondOrder, ProbePhase::kAfter},        {Mode::kSecondOrder, ProbePhase::kAfter},
      {Mode::kSecondOrder, ProbePhase::kAfter},        {Mode::kSecondOrder, ProbePhase::kWaiting},
  };
  CostProbe probe;
  int index = 0;
  for (const auto& step : steps) {
    probe = AdvanceProbe(config, probe, Step(1.0 - 0.01 * index, step.mode));
    EXPECT_EQ(probe.phase, step.after) << index << ": " << ProbePhaseName(probe.phase);
    ++index;
  }
  EXPECT_EQ(probe.rounds, 1);
}

TEST(CostProbeTest, WaitsUntilItMayBegin) {
  CostProbe probe;
  for (int i = 0; i < 50; ++i) {
    probe = AdvanceProbe(Small(), probe, {.loss = 1, .seconds = 1, .mode = Mode::kSecondOrder, .may_begin = false});
  }
  EXPECT_EQ(probe.phase, ProbePhase::kWaiting);
}

// Powers of two: the windows' sums are exact, and so are the rates.
TEST(CostProbeTest, ComparesDecreasePerSecondWithTheMargin) {
  const struct {
    double second, second_seconds, first;
    int64_t wins;
  } cases[] = {
      {2, 1, 4, 1},     // first order is twice as good
      {4, 1, 2, 0},     // and half as good
      {4, 4, 2, 1},     // half as good a step, but four times as fast
      {4, 1, 5, 0},     // better by exactly the margin of 1/4
      {4, 1, 5.25, 1},  // by more
      {-4, 1, -3, 0},   // both rise: -3 is better than -4 by the margin, exactly
      {-4, 1, -2, 1},   //
      {0, 1, 0, 0},     // a plateau: not better
      {0, 1, 0.5, 1},   //
      {2, 1, -2, 0},    //
  };
  for (const auto& c : cases) {
    for (const size_t delay : {0, 5}) {
      const CostProbe probe = RunRounds(Small(), 1, c.second, c.second_seconds, c.first, delay);
      EXPECT_EQ(probe.second_order_per_second, c.second / c.second_seconds);
      EXPECT_EQ(probe.first_order_per_second, c.first);
      EXPECT_EQ(probe.wins, c.wins) << c.second << " in " << c.second_seconds << " s against " << c.first;
    }
  }
}

TEST(CostProbeTest, WinsAddUpAndALossClearsThem) {
  CostProbe probe = RunRounds(Small(), 3, 2, 1, 4);
  EXPECT_EQ(probe.wins, 3);
  EXPECT_EQ(RestartProbe(probe).wins, 0);
  EXPECT_EQ(RestartProbe(probe).rounds, 3);
  // One more round in which first order stands still.
  double loss = 100;
  for (int step = 0; step < 100 && probe.rounds < 4; ++step) {
    const Mode mode = ProbeMode(probe.phase);
    if (mode == Mode::kSecondOrder) loss -= 1;
    probe = AdvanceProbe(Small(), probe, Step(loss, mode));
  }
  EXPECT_EQ(probe.rounds, 4);
  EXPECT_EQ(probe.wins, 0);
}

// On a curve that flattens, what comes later falls slower; windows on both sides keep that from counting against the
// probe: equal methods stay equal up to the curvature.
TEST(CostProbeTest, AFlatteningCurveIsNotHeldAgainstTheProbe) {
  FallbackConfig config = Small();
  config.probe_settle_steps = 0;
  CostProbe probe;
  for (int step = 0; probe.rounds < 1 && step < 100; ++step) {
    probe = AdvanceProbe(config, probe, Step(100 - step + 0.01 * step * step, ProbeMode(probe.phase)));
  }
  ASSERT_EQ(probe.rounds, 1);
  // Of a parabola the least-squares slope over a window is that at its middle; the mean of the outer ones is the inner.
  EXPECT_NEAR(probe.first_order_per_second, probe.second_order_per_second, 1e-12);
}

TEST(CostProbeTest, AnotherModeThanAskedForEndsTheRound) {
  CostProbe probe;
  for (int step = 0; step < 100 && probe.phase != ProbePhase::kProbe; ++step) {
    probe = AdvanceProbe(Small(), probe, Step(1, ProbeMode(probe.phase)));
  }
  ASSERT_EQ(probe.phase, ProbePhase::kProbe);
  probe = AdvanceProbe(Small(), probe, Step(1, Mode::kSecondOrder));
  EXPECT_EQ(probe.phase, ProbePhase::kWaiting);
  EXPECT_EQ(probe.rounds, 0);
}

TEST(CostProbeTest, StepsWithoutATimeAreNotMeasuredAndEndTheRoundInTheEnd) {
  for (const double seconds : {0.0, -1.0, kNaN, std::numeric_limits<double>::infinity()}) {
    CostProbe probe;
    for (int step = 0; step < 100 && probe.phase != ProbePhase::kProbe; ++step) {
      probe = AdvanceProbe(Small(), probe, Step(1, ProbeMode(probe.phase)));
    }
    const LossWindow before = probe.probe;
    for (int i = 0; i < 3; ++i) {
      probe = AdvanceProbe(Small(), probe, Step(1, Mode::kFirstOrder, seconds));
      EXPECT_EQ(probe.phase, ProbePhase::kProbe);
    }
    EXPECT_EQ(probe.probe, before);
    probe = AdvanceProbe(Small(), probe, Step(1, Mode::kFirstOrder, seconds));
    EXPECT_EQ(probe.phase, ProbePhase::kWaiting);
  }
}

TEST(CostProbeTest, NothingIsWonByAnOverflow) {
  const double huge = std::numeric_limits<double>::max();
  CostProbe probe;
  for (int step = 0; step < 100 && probe.rounds < 1; ++step) {
    const Mode mode = ProbeMode(probe.phase);
    probe = AdvanceProbe(Small(), probe, Step(step % 2 == 0 ? huge : -huge, mode));
  }
  EXPECT_EQ(probe.rounds, 1);
  EXPECT_EQ(probe.wins, 0);
  // One sum alone overflows, and first order's rate is infinite: -half is the last of its window's four losses.
  probe = CostProbe();
  for (int step = 0; step < 100 && probe.rounds < 1; ++step) {
    const bool last = probe.phase == ProbePhase::kProbe && probe.probe.steps == 3;
    probe = AdvanceProbe(Small(), probe, Step(last ? -huge / 2 : 0, ProbeMode(probe.phase)));
  }
  EXPECT_EQ(probe.rounds, 1);
  EXPECT_FALSE(std::isfinite(probe.first_order_per_second));
  EXPECT_EQ(probe.wins, 0);
}

}  // namespace
}  // namespace precondor

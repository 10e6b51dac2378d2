// SPDX-License-Identifier: Apache-2.0
#include "server/policy/fallback.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/reference/fallback.h"

namespace precondor {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kRounding = 1e-10;

// r is the last decrease of l: cases can be worked out by hand.
FallbackConfig Plain(FallbackPolicy policy = FallbackPolicy::kLossRate) {
  return {.policy = policy, .rate_decay = 0, .min_steps = 3, .beta = 0.25, .patience_steps = 2};
}

// Returns the state after steps whose smoothed losses are `smoothed`, to within rounding.
FallbackState After(const FallbackConfig& config, const std::vector<double>& smoothed, FallbackState state = {}) {
  for (const double wanted : smoothed) {
    const uint64_t step = state.observed ? state.last_step + 1 : 0;
    const Mode mode = state.forced.value_or(Decide(config, state).mode);
    const double before = state.trend.loss;
    const double loss = state.trend.started ? before + (wanted - before) / (1 - kLossDecay) : wanted;
    state = Advance(config, state, {.step = step, .loss = loss, .seconds = 1, .mode = mode});
  }
  return state;
}

TEST(FallbackTest, LossRateDecidesByHand) {
  using R = FallbackReason;
  const struct {
    const char* what;
    std::vector<double> losses;
    R reason;
    int32_t streak;
  } cases[] = {
      {"nothing seen", {}, R::kTooEarly, 0},
      {"one step", {64}, R::kTooEarly, 0},
      {"two decreases: t - t0 = 2", {64, 32, 16}, R::kTooEarly, 0},
      // t = 3: r = 8, mean 56 / 3, a quarter of it 4.67.
      {"fast enough", {64, 32, 16, 8}, R::kStillFalling, 0},
      // t = 3: r = 3, mean 51 / 3 = 17, threshold 4.25.
      {"slow once", {64, 32, 16, 13}, R::kSlow, 1},
      // t = 4: r = 1, mean 13, threshold 3.25.
      {"slow twice", {64, 32, 16, 13, 12}, R::kLossRate, 2},
      // t = 4: r = 5, mean 14, threshold 3.5.
      {"slow, then fast", {64, 32, 16, 13, 8}, R::kStillFalling, 0},
      // t = 3: r = 4.125, mean 48.125 / 3 = 16.04, threshold 4.01.
      {"just above the threshold", {64, 40, 20, 15.875}, R::kStillFalling, 0},
      // t = 2 would have been slow, too: it does not count before min_steps.
      {"slow from the start", {64, 60, 60, 60}, R::kSlow, 1},
      // r = 0 and the mean is 0: 0 < 0 does not hold.
      {"no progress at all", {64, 64, 64, 64, 64, 64}, R::kStillFalling, 0},
      // r = -1, mean -1, threshold -.25.
      {"rising", {64, 65, 66, 67, 68}, R::kLossRate, 2},
  };
  for (const auto& c : cases) {
    const FallbackDecision decision = Decide(Plain(), After(Plain(), c.losses));
    EXPECT_EQ(decision.reason, c.reason) << c.what << ": " << decision.sentence;
    EXPECT_EQ(decision.state.streak_steps, c.streak) << c.what;
    EXPECT_EQ(decision.mode, c.reason == R::kLossRate ? Mode::kFirstOrder : Mode::kSecondOrder) << c.what;
    EXPECT_EQ(decision.from_step, 0u) << c.what;
  }
}

TEST(FallbackTest, ADecisionCarriesItsStateAndSaysItsNumbers) {
  const FallbackState state = After(Plain(), {64, 32, 16, 13, 12});
  const FallbackDecision decision = Decide(Plain(), state);
  EXPECT_EQ(decision.state, state);
  EXPECT_EQ(state.last_step, 4u);
  EXPECT_EQ(state.uncounted_steps, 0u);
  EXPECT_EQ(state.trend.phase_step, 0u);
  EXPECT_EQ(state.trend.phase_steps, 4u);
  EXPECT_EQ(state.streak_steps, 2);
  EXPECT_EQ(state.mode, Mode::kSecondOrder);
  const std::vector<double> numbers = {
      state.trend.loss,           state.trend.rate,           state.trend.phase_loss,
      PhaseDecrease(state.trend), PhaseMeanRate(state.trend), decision.threshold_rate,
      state.second_order_seconds, state.trend.learning_rate,  state.first_order_seconds};
  EXPECT_THAT(numbers,
              testing::Pointwise(testing::DoubleNear(kRounding), {12.0, 1.0, 64.0, 52.0, 13.0, 3.25, 1.0, 0.0, 0.0}));
  EXPECT_EQ(
      decision.sentence,
      "falls back to first order: at step 4 the smoothed loss 12 falls by 1 a step, less than 3.25 (the mean since "
      "step 0 is 13), for 2 steps");
}

TEST(FallbackTest, AFallbackIsKeptWhateverTheLossDoesThen) {
  FallbackState state = After(Plain(), {64, 32, 16, 13, 12});
  state = After(Plain(), {6, 3, 1, 0, -10, -100, -1000, -10000, -100000}, state);
  const FallbackDecision decision = Decide(Plain(), state);
  EXPECT_EQ(decision.mode, Mode::kFirstOrder);
  EXPECT_EQ(decision.reason, FallbackReason::kStaysFirstOrder);
  EXPECT_EQ(decision.state.switch_step, 4u);
  EXPECT_EQ(decision.sentence, "first order since step 4");
}

TEST(FallbackTest, StepsGrantedBeforeASwitchSayNothingOfTheNewMode) {
  FallbackConfig config = Plain();
  // Set free from first order, and still a step in first order: it is slow, and does not count.
  FallbackState state = Force(config, After(config, {64, 32, 16, 13}), Mode::kFirstOrder);
  state = Force(config, state, Mode::kSecondOrder);
  state = Force(config, state, std::nullopt);
  config.min_steps = 1;
  for (uint64_t step = 4; step < 9; ++step) {
    const double loss = 20.0 * static_cast<double>(step);
    state = Advance(config, state, {.step = step, .loss = loss, .mode = Mode::kFirstOrder});
    EXPECT_EQ(state.streak_steps, 0);
  }
  state = Advance(config, state, {.step = 9, .loss = 180, .mode = Mode::kSecondOrder});
  EXPECT_EQ(state.streak_steps, 1);
}

TEST(FallbackTest, NeverStaysWhateverTheLossDoes) {
  const FallbackState state = After(Plain(FallbackPolicy::kNever), {64, 32, 16, 13, 12, 12, 12, 12});
  const FallbackDecision decision = Decide(Plain(FallbackPolicy::kNever), state);
  EXPECT_EQ(decision.mode, Mode::kSecondOrder);
  EXPECT_EQ(decision.reason, FallbackReason::kNever);
  EXPECT_NEAR(decision.state.trend.loss, 12, kRounding) << "for the graphs";
}

TEST(FallbackTest, AtStepIsKnownFromTheStart) {
  FallbackConfig config = Plain(FallbackPolicy::kAtStep);
  config.at_step = 100;
  for (const FallbackState& state : {FallbackState(), After(config, {64, 32, 16, 13, 12, 12, 12})}) {
    const FallbackDecision decision = Decide(config, state);
    EXPECT_EQ(decision.mode, Mode::kFirstOrder);
    EXPECT_EQ(decision.from_step, 100u);
    EXPECT_EQ(decision.reason, FallbackReason::kAtStep);
    EXPECT_EQ(decision.sentence, "first order from step 100 on: the policy is AT_STEP");
  }
}

TEST(FallbackTest, StepsThatAreNotNewAreIgnored) {
  const FallbackState state = After(Plain(), {64, 32, 16, 13, 12});
  for (const uint64_t step : {0, 3, 4}) {
    EXPECT_EQ(Advance(Plain(), state, {.step = step, .loss = 1000, .learning_rate = 5, .seconds = 9}), state) << step;
    EXPECT_EQ(Advance(Plain(), state, {.step = step, .skipped = true}), state) << step;
  }
}

TEST(FallbackTest, AGapInTheStepsIsOneStep) {
  FallbackState state;
  for (const uint64_t step : {5, 9, 100, 200}) {
    state = Advance(Plain(), state, {.step = step, .loss = 1000.0 - static_cast<double>(step)});
  }
  EXPECT_EQ(state.trend.phase_step, 5u);
  EXPECT_EQ(state.trend.phase_steps, 3u) << "counted steps: the mean is of what was seen";
  EXPECT_EQ(state.last_step, 200u);
}

TEST(FallbackTest, StepsThatDoNotCountMoveTheirCountersAlone) {
  const FallbackState state = After(Plain(), {64, 32, 16, 13});
  const double bad[] = {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity(), 5};
  for (const double loss : bad) {
    FallbackState expected = state;
    expected.last_step = 9;
    expected.uncounted_steps = 1;
    EXPECT_EQ(
        Advance(Plain(), state, {.step = 9, .loss = loss, .learning_rate = 0.1, .seconds = 7, .skipped = loss == 5}),
        expected);
  }
}

TEST(FallbackTest, AnOverflowingLossDoesNotCount) {
  const double huge = std::numeric_limits<double>::max();
  FallbackState state = Advance(Plain(), {}, {.step = 0, .loss = huge});
  // The smoothed loss is (2 .95^t - 1) of the greatest number, and negative at t = 14.
  for (uint64_t step = 1; step < 15; ++step) state = Advance(Plain(), state, {.step = step, .loss = -huge});
  EXPECT_EQ(state.uncounted_steps, 1u);
  EXPECT_EQ(state.last_step, 14u);
  EXPECT_GT(state.trend.loss, 0);
}

TEST(FallbackTest, SecondsAreSmoothedByMode) {
  FallbackState state;
  const struct {
    double seconds;
    Mode mode;
    double second, first;
  } steps[] = {{4, Mode::kSecondOrder, 4, 0},    {2, Mode::kSecondOrder, 3.9, 0},
               {1, Mode::kFirstOrder, 3.9, 1},   {0, Mode::kFirstOrder, 3.9, 1},
               {-2, Mode::kFirstOrder, 3.9, 1},  {std::numeric_limits<double>::quiet_NaN(), Mode::kSecondOrder, 3.9, 1},
               {2, Mode::kFirstOrder, 3.9, 1.05}};
  uint64_t step = 0;
  for (const auto& s : steps) {
    state = Advance(Plain(), state, {.step = step++, .loss = 1, .seconds = s.seconds, .mode = s.mode});
    EXPECT_NEAR(state.second_order_seconds, s.second, kRounding) << step;
    EXPECT_NEAR(state.first_order_seconds, s.first, kRounding) << step;
  }
}

TEST(FallbackForceTest, GoesBeforeEveryPolicy) {
  for (const FallbackPolicy policy : {FallbackPolicy::kNever, FallbackPolicy::kLossRate, FallbackPolicy::kAtStep}) {
    FallbackConfig config = Plain(policy);
    config.at_step = 2;
    for (const Mode mode : {Mode::kSecondOrder, Mode::kFirstOrder}) {
      const FallbackState state = After(config, {64, 32, 16, 13, 12, 12, 12}, Force(config, {}, mode));
      const FallbackDecision decision = Decide(config, state);
      EXPECT_EQ(decision.mode, mode) << FallbackPolicyName(policy);
      EXPECT_EQ(decision.reason, FallbackReason::kForced);
      EXPECT_EQ(decision.from_step, 0u);
      EXPECT_EQ(decision.sentence, std::string(ModeName(mode)) + " is forced by an operator");
      EXPECT_NEAR(decision.state.trend.loss, 12, kRounding) << "the trend goes on";
    }
  }
}

TEST(FallbackForceTest, ThePolicyGoesOnFromTheForcedMode) {
  const FallbackConfig config = Plain();
  FallbackState state = Force(config, After(config, {64, 32, 16}), Mode::kFirstOrder);
  state = Force(config, After(config, {8, 4}, state), std::nullopt);
  EXPECT_EQ(Decide(config, state).reason, FallbackReason::kStaysFirstOrder);
  EXPECT_EQ(Decide(config, state).state.switch_step, 4u);
  state = Force(config, state, Mode::kSecondOrder);
  state = Force(config, state, std::nullopt);
  EXPECT_EQ(Decide(config, state).reason, FallbackReason::kTooEarly) << "a new phase";
  EXPECT_EQ(Decide(config, state).mode, Mode::kSecondOrder);
}

TEST(FallbackForceTest, ForcedSecondOrderSavesUpNoFallback) {
  const FallbackConfig config = Plain();
  FallbackState state = Force(config, After(config, {64, 32}), Mode::kSecondOrder);
  state = Force(config, After(config, {31, 30, 30, 30, 30, 30}, state), std::nullopt);
  EXPECT_EQ(Decide(config, state).mode, Mode::kSecondOrder);
  EXPECT_EQ(state.streak_steps, 0);
}

TEST(FallbackForceTest, NothingSpeaksForAChangeMeanwhile) {
  const FallbackConfig config = Plain();
  FallbackState state = After(config, {64, 32, 16, 13});
  ASSERT_EQ(state.streak_steps, 1);
  state = Force(config, state, Mode::kSecondOrder);
  EXPECT_EQ(state.streak_steps, 0);
  EXPECT_EQ(After(config, {12}, state).streak_steps, 0);
  EXPECT_EQ(After(config, {12, 12, 12, 12}, state).mode, Mode::kSecondOrder);
}

TEST(FallbackForceTest, ADecisionMadeBeforeIsKept) {
  const FallbackConfig config = Plain();
  FallbackState state = After(config, {64, 32, 16, 13, 12});
  ASSERT_EQ(Decide(config, state).reason, FallbackReason::kLossRate);
  state = Force(config, state, Mode::kFirstOrder);
  EXPECT_EQ(state.mode, Mode::kFirstOrder);
  EXPECT_EQ(state.switch_step, 4u);
}

TEST(FallbackForceTest, RepeatingAChoiceChangesNothing) {
  const FallbackConfig config = Plain();
  const FallbackState state = After(config, {64, 32, 16, 13});
  EXPECT_EQ(Force(config, state, std::nullopt), state);
  const FallbackState forced = After(config, {12}, Force(config, state, Mode::kSecondOrder));
  EXPECT_EQ(Force(config, forced, Mode::kSecondOrder), forced);
}

TEST(FallbackForceTest, NeverAndAtStepGoOnFromTheirOwnMode) {
  const FallbackConfig never = Plain(FallbackPolicy::kNever);
  FallbackState state = Force(never, Force(never, After(never, {3, 2}), Mode::kFirstOrder), std::nullopt);
  EXPECT_EQ(Decide(never, state).mode, Mode::kSecondOrder);
  FallbackConfig at = Plain(FallbackPolicy::kAtStep);
  at.at_step = 50;
  state = Force(at, Force(at, After(at, {3, 2}), Mode::kSecondOrder), std::nullopt);
  EXPECT_EQ(Decide(at, state).from_step, 50u);
}

TEST(FallbackCarryOutTest, ChangesOnlyWhatIsOpen) {
  using Schedule = std::vector<ModeInterval>;
  const Mode second = Mode::kSecondOrder, first = Mode::kFirstOrder;
  const struct {
    const char* what;
    Schedule schedule;
    Mode mode;
    uint64_t from_step, first_open_step;
    Schedule expected;
  } cases[] = {
      {"no change", {{0, second}}, second, 0, 17, {{0, second}}},
      {"falls back beyond the lease", {{0, second}}, first, 0, 17, {{0, second}, {17, first}}},
      {"again, later", {{0, second}, {17, first}}, first, 0, 20, {{0, second}, {17, first}}},
      {"goes back", {{0, second}, {17, first}}, second, 0, 30, {{0, second}, {17, first}, {30, second}}},
      {"called back before it began", {{0, second}, {17, first}}, second, 0, 17, {{0, second}}},
      {"at a step to come", {{0, second}}, first, 50, 17, {{0, second}, {50, first}}},
      {"the same, again", {{0, second}, {50, first}}, first, 50, 18, {{0, second}, {50, first}}},
      {"at a step that is granted", {{0, second}}, first, 5, 17, {{0, second}, {17, first}}},
      {"forced back before it", {{0, second}, {50, first}}, second, 0, 17, {{0, second}}},
      {"set free from first order before it", {{0, first}}, first, 50, 17, {{0, first}, {17, second}, {50, first}}},
      {"nothing granted", {{0, second}}, first, 0, 0, {{0, first}}},
      {"nothing granted, at a step to come", {}, first, 3, 0, {{0, second}, {3, first}}},
      {"an empty schedule is second order", {}, first, 0, 9, {{0, second}, {9, first}}},
  };
  for (const auto& c : cases) {
    FallbackDecision decision;
    decision.mode = c.mode;
    decision.from_step = c.from_step;
    const Schedule carried = ApplyDecision(decision, c.schedule, c.first_open_step);
    EXPECT_EQ(carried, c.expected) << c.what;
    EXPECT_EQ(ApplyDecision(decision, carried, c.first_open_step), carried) << c.what << ": a second time";
    for (uint64_t step = 0; step < c.first_open_step; ++step) {
      EXPECT_EQ(ModeAt(carried, step), ModeAt(c.schedule, step)) << c.what << ": granted step " << step;
    }
  }
}

TEST(FallbackTest, ReasonsHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const int reason : {1, 2, 3, 4, 5, 6, 7, 12}) {
    const std::string name(FallbackReasonName(static_cast<FallbackReason>(reason)));
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(names.count("UNKNOWN"), 0u);
  EXPECT_EQ(FallbackReasonName(FallbackReason(13)), "UNKNOWN");
}

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

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(LeaseTest, ModeOfAStepIsThatOfItsInterval) {
  const std::vector<ModeInterval> schedule = {
      {0, Mode::kSecondOrder}, {100, Mode::kFirstOrder}, {200, Mode::kSecondOrder}};
  EXPECT_EQ(ModeAt(schedule, 0), Mode::kSecondOrder);
  EXPECT_EQ(ModeAt(schedule, 99), Mode::kSecondOrder);
  EXPECT_EQ(ModeAt(schedule, 100), Mode::kFirstOrder);
  EXPECT_EQ(ModeAt(schedule, 199), Mode::kFirstOrder);
  EXPECT_EQ(ModeAt(schedule, kMax), Mode::kSecondOrder);
  EXPECT_EQ(ModeAt({}, 5), Mode::kSecondOrder);
}

TEST(LeaseTest, ModesBetweenCoverTheRangeAndNoMore) {
  const std::vector<ModeInterval> schedule = {
      {0, Mode::kSecondOrder}, {100, Mode::kFirstOrder}, {200, Mode::kSecondOrder}};
  EXPECT_THAT(ModesBetween(schedule, 10, 99), ElementsAre(ModeInterval{10, Mode::kSecondOrder}));
  EXPECT_THAT(ModesBetween(schedule, 10, 100),
              ElementsAre(ModeInterval{10, Mode::kSecondOrder}, ModeInterval{100, Mode::kFirstOrder}));
  EXPECT_THAT(ModesBetween(schedule, 150, 250),
              ElementsAre(ModeInterval{150, Mode::kFirstOrder}, ModeInterval{200, Mode::kSecondOrder}));
}

}  // namespace

}  // namespace precondor

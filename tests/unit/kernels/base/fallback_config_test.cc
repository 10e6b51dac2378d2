// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/fallback_config.h"

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using testing::HasSubstr;
using Change = std::function<void(FallbackConfig&)>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(FallbackConfigTest, NamesTheFieldWhatWasExpectedAndWhatCame) {
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(0); }, "fallback.policy: expected 1 ... 4, got 0"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(5); }, "fallback.policy: expected 1 ... 4, got 5"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy::kAtStep; }, "fallback.at_step: expected a step, for AT_STEP"},
      {[](FallbackConfig& c) { c.loss_decay = 1; }, "fallback.loss_decay: expected a number in [0, 1), got 1"},
      {[](FallbackConfig& c) { c.loss_decay = kNaN; }, "fallback.loss_decay"},
      {[](FallbackConfig& c) { c.rate_decay = -0.5; }, "fallback.rate_decay: expected a number in [0, 1), got -0.5"},
      {[](FallbackConfig& c) { c.rate_decay = kNaN; }, "fallback.rate_decay"},
      {[](FallbackConfig& c) { c.lr_jump = 0; }, "fallback.lr_jump: expected a positive number, got 0"},
      {[](FallbackConfig& c) { c.lr_jump = kInf; }, "fallback.lr_jump"},
      {[](FallbackConfig& c) { c.min_steps = 0; }, "fallback.min_steps: expected 1 ... 1073741824, got 0"},
      {[](FallbackConfig& c) { c.beta = 1.5; }, "fallback.beta: expected a number in [0, 1], got 1.5"},
      {[](FallbackConfig& c) { c.beta = kNaN; }, "fallback.beta"},
      {[](FallbackConfig& c) { c.patience_steps = 0; }, "fallback.patience_steps: expected 1 ..."},
      {[](FallbackConfig& c) { c.probe_interval_steps = 0; }, "fallback.probe_interval_steps: expected 1 ..."},
      {[](FallbackConfig& c) { c.probe_settle_steps = -1; }, "fallback.probe_settle_steps: expected 0 ..."},
      {[](FallbackConfig& c) { c.probe_steps = 1; }, "fallback.probe_steps: expected 2 ..."},
      {[](FallbackConfig& c) { c.probe_margin = -1; }, "fallback.probe_margin: expected at least 0, got -1"},
      {[](FallbackConfig& c) { c.probe_margin = kInf; }, "fallback.probe_margin"},
      {[](FallbackConfig& c) { c.probe_wins = 0; }, "fallback.probe_wins: expected 1 ..."},
      {[](FallbackConfig& c) { c.reentry_beta = 1.5; }, "fallback.reentry_beta: expected more than beta (0.1) and at"},
      {[](FallbackConfig& c) { c.reentry_beta = kNaN; }, "fallback.reentry_beta"},
      {[](FallbackConfig& c) { c.reentry = true, c.reentry_beta = 0.1; }, "fallback.reentry_beta"},
      {[](FallbackConfig& c) { c.reentry_min_steps = 0; }, "fallback.reentry_min_steps: expected 1 ..."},
      {[](FallbackConfig& c) { c.reentry_min_decrease = kNaN; }, "fallback.reentry_min_decrease: expected at least 0"},
  };
  for (const auto& [spoil, text] : cases) {
    FallbackConfig config;
    spoil(config);
    const absl::Status status = ValidateFallbackConfig(config);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
}

TEST(FallbackConfigTest, AcceptsDefaultsAndWhatIsExactlyAtTheLimits) {
  EXPECT_TRUE(ValidateFallbackConfig({}).ok());
  FallbackConfig config = {.policy = FallbackPolicy::kAtStep,
                           .at_step = 0,
                           .loss_decay = 0,
                           .rate_decay = 0,
                           .min_steps = 1,
                           .beta = 0,
                           .patience_steps = 1,
                           .probe_interval_steps = 1 << 30,
                           .probe_settle_steps = 0,
                           .probe_steps = 2,
                           .probe_margin = 0,
                           .probe_wins = 1,
                           .reentry = true,
                           .reentry_beta = 1,
                           .reentry_min_steps = 1,
                           .reentry_min_decrease = 0};
  EXPECT_TRUE(ValidateFallbackConfig(config).ok()) << ValidateFallbackConfig(config);
  config.beta = 1;  // leaves no room for re-entry, and needs none where that is off
  EXPECT_FALSE(ValidateFallbackConfig(config).ok());
  config.reentry = false;
  EXPECT_TRUE(ValidateFallbackConfig(config).ok());
}

TEST(FallbackConfigTest, DescribesADifferenceInAnyField) {
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](FallbackConfig& c) { c.policy = FallbackPolicy::kLossRate; }, "policy: have NEVER, got LOSS_RATE"},
      {[](FallbackConfig& c) { c.at_step = 7; }, "at_step: have none, got 7"},
      {[](FallbackConfig& c) { c.loss_decay = 0.5; }, "loss_decay: have 0.95, got 0.5"},
      {[](FallbackConfig& c) { c.rate_decay = 0.5; }, "rate_decay: have 0.99, got 0.5"},
      {[](FallbackConfig& c) { c.lr_jump = 0.5; }, "lr_jump: have 0.1, got 0.5"},
      {[](FallbackConfig& c) { c.min_steps = 5; }, "min_steps: have 200, got 5"},
      {[](FallbackConfig& c) { c.beta = 0.5; }, "beta: have 0.1, got 0.5"},
      {[](FallbackConfig& c) { c.patience_steps = 5; }, "patience_steps: have 50, got 5"},
      {[](FallbackConfig& c) { c.probe_interval_steps = 5; }, "probe_interval_steps: have 1000, got 5"},
      {[](FallbackConfig& c) { c.probe_settle_steps = 5; }, "probe_settle_steps: have 20, got 5"},
      {[](FallbackConfig& c) { c.probe_steps = 5; }, "probe_steps: have 100, got 5"},
      {[](FallbackConfig& c) { c.probe_margin = 5; }, "probe_margin: have 0.1, got 5"},
      {[](FallbackConfig& c) { c.probe_wins = 5; }, "probe_wins: have 3, got 5"},
      {[](FallbackConfig& c) { c.reentry = true; }, "reentry: have 0, got 1"},
      {[](FallbackConfig& c) { c.reentry_beta = 0.75; }, "reentry_beta: have 0.5, got 0.75"},
      {[](FallbackConfig& c) { c.reentry_min_steps = 5; }, "reentry_min_steps: have 1000, got 5"},
      {[](FallbackConfig& c) { c.reentry_min_decrease = 0.5; }, "reentry_min_decrease: have 0.05, got 0.5"},
  };
  EXPECT_EQ(DescribeDifference(FallbackConfig{}, FallbackConfig{}), "");
  for (const auto& [change, expected] : cases) {
    FallbackConfig want;
    change(want);
    EXPECT_EQ(DescribeDifference(FallbackConfig{}, want), expected);
  }
}

}  // namespace
}  // namespace precondor

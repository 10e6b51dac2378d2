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
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(0); }, "fallback.policy: expected 1, 2 or 4, got 0"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(3); }, "fallback.policy: expected 1, 2 or 4, got 3"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(5); }, "fallback.policy: expected 1, 2 or 4, got 5"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy::kAtStep; }, "fallback.at_step: expected a step, for AT_STEP"},
      {[](FallbackConfig& c) { c.rate_decay = -0.5; }, "fallback.rate_decay: expected a number in [0, 1), got -0.5"},
      {[](FallbackConfig& c) { c.rate_decay = kNaN; }, "fallback.rate_decay"},
      {[](FallbackConfig& c) { c.lr_jump = 0; }, "fallback.lr_jump: expected a positive number, got 0"},
      {[](FallbackConfig& c) { c.lr_jump = kInf; }, "fallback.lr_jump"},
      {[](FallbackConfig& c) { c.min_steps = 0; }, "fallback.min_steps: expected 1 ... 1073741824, got 0"},
      {[](FallbackConfig& c) { c.beta = 1.5; }, "fallback.beta: expected a number in [0, 1], got 1.5"},
      {[](FallbackConfig& c) { c.beta = kNaN; }, "fallback.beta"},
      {[](FallbackConfig& c) { c.patience_steps = 0; }, "fallback.patience_steps: expected 1 ..."},
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
  FallbackConfig config = {
      .policy = FallbackPolicy::kAtStep, .at_step = 0, .rate_decay = 0, .min_steps = 1, .beta = 0, .patience_steps = 1};
  EXPECT_TRUE(ValidateFallbackConfig(config).ok()) << ValidateFallbackConfig(config);
  config.beta = 1;
  EXPECT_TRUE(ValidateFallbackConfig(config).ok());
}

}  // namespace
}  // namespace precondor

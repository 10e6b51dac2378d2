// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/schedule.h"

#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <string>

namespace precondor {
namespace {

using testing::HasSubstr;

TEST(ScheduleTest, FollowsItsTable) {
  const struct {
    std::string text;
    uint64_t t;
    double value;
  } table[] = {
      {"0.001", 0, 0.001},
      {"0.001", std::numeric_limits<uint64_t>::max(), 0.001},
      {"-2e3", 7, -2000},
      {"exponential(0.1, 0.5, 0.02)", 0, 0.1},
      {"exponential(0.1, 0.5, 0.02)", 1, 0.05},
      {"exponential(0.1, 0.5, 0.02)", 2, 0.025},
      {"exponential(0.1, 0.5, 0.02)", 3, 0.02},
      {"exponential(0.1, 0.5, 0.02)", std::numeric_limits<uint64_t>::max(), 0.02},
      {"exponential(1,2,100)", 6, 64},
      {"exponential(1,2,100)", 7, 100},
      {"exponential(1,2,100)", 1 << 20, 100},  // beyond f64 without its limit
      {"linear(0.1, 0.5, 4)", 0, 0.1},
      {"linear(0.1, 0.5, 4)", 1, 0.2},
      {"linear(0.1, 0.5, 4)", 3, 0.4},
      {"linear(0.1, 0.5, 4)", 4, 0.5},
      {"linear(0.1, 0.5, 4)", 1000, 0.5},
      {"linear(3, -1, 2)", 1, 1},
      {"piecewise(1, 10: 2, 20: 0.5)", 0, 1},
      {"piecewise(1, 10: 2, 20: 0.5)", 9, 1},
      {"piecewise(1, 10: 2, 20: 0.5)", 10, 2},
      {"piecewise(1, 10: 2, 20: 0.5)", 19, 2},
      {"piecewise(1, 10: 2, 20: 0.5)", 20, 0.5},
      {"piecewise(1,10:2,20:0.5)", std::numeric_limits<uint64_t>::max(), 0.5},
  };
  for (const auto& [text, t, value] : table) {
    const absl::StatusOr<Schedule> schedule = Schedule::Parse(text);
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    EXPECT_NEAR(schedule->At(t), value, 4e-16 * std::abs(value)) << text << " at " << t;
  }
}

TEST(ScheduleTest, KnowsItsBounds) {
  const struct {
    std::string text;
    double lowest, highest;
  } table[] = {
      {"0.25", 0.25, 0.25},        {"exponential(0.1, 0.5, 0.02)", 0.02, 0.1}, {"exponential(1, 2, 100)", 1, 100},
      {"linear(3, -1, 2)", -1, 3}, {"piecewise(1, 10: 2, 20: 0.5)", 0.5, 2},   {"piecewise(7, 10: 8)", 7, 8}};
  for (const auto& [text, lowest, highest] : table) {
    const Schedule schedule = Schedule::Parse(text).value();
    EXPECT_EQ(schedule.lowest(), lowest) << text;
    EXPECT_EQ(schedule.highest(), highest) << text;
    for (uint64_t t = 0; t < 50; ++t) {
      EXPECT_GE(schedule.At(t), lowest);
      EXPECT_LE(schedule.At(t), highest);
    }
  }
}

TEST(ScheduleTest, RefusesWhatItCannotRead) {
  for (const std::string text : {"",
                                 "x",
                                 "nan",
                                 "inf",
                                 "1e999",
                                 "0.1.2",
                                 "exponential(1, 0.5)",
                                 "exponential(1, 0, 0.1)",
                                 "exponential(1, 1, 1)",
                                 "exponential(1, 0.5, 2)",
                                 "exponential(1, 2, 0.5)",
                                 "exponential(0, 0.5, 0)",
                                 "exponential(1, 0.5, 0.1",
                                 "linear(1, 2)",
                                 "linear(1, 2, 0)",
                                 "linear(1, 2, -3)",
                                 "linear(1, 2, 3.5)",
                                 "linear(1, nan, 3)",
                                 "linear()",
                                 "piecewise(1)",
                                 "piecewise(1, 0: 2)",
                                 "piecewise(1, 10: 2, 10: 3)",
                                 "piecewise(1, 10)",
                                 "piecewise(1, 10:)",
                                 "cosine(1, 2, 3)",
                                 "linear(1, 2, 3) x"}) {
    const absl::Status status = Schedule::Parse(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected")) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("got \"")) << text;
  }
}

}  // namespace
}  // namespace precondor

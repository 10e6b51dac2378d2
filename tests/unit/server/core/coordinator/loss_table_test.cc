// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/loss_table.h"

#include <cmath>

#include "gtest/gtest.h"

namespace precondor {
namespace {

TEST(LossTableTest, AveragesFiniteLossesBySamplesOnceAllReported) {
  LossTable table(3, 8);
  EXPECT_FALSE(table.Add(2, 5, 4.0, 30, true, 0.1).has_value());
  EXPECT_FALSE(table.Add(0, 5, 1.0, 10, true, 0.1).has_value());
  EXPECT_FALSE(table.Add(0, 5, 9.0, 10, true, 0.1).has_value()) << "a repetition";
  const auto done = table.Add(1, 5, std::nan(""), 1000, true, 0.2);
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->step, 5u);
  EXPECT_EQ(done->finite, 2);
  EXPECT_EQ(done->samples, 40u);
  EXPECT_DOUBLE_EQ(done->loss, (10 * 1.0 + 30 * 4.0) / 40);
  EXPECT_EQ(done->learning_rate, 0.2) << "the greatest";
  EXPECT_FALSE(table.Add(1, 5, 1.0, 10, true, 0.1).has_value()) << "finished already";
}

TEST(LossTableTest, SkippedStepsDoNotCount) {
  LossTable table(2, 8);
  table.Add(0, 1, 3.0, 10, false, 0.1);
  const auto done = table.Add(1, 1, 5.0, 10, false, 0.1);
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->finite, 0);
  EXPECT_TRUE(std::isnan(done->loss));
}

TEST(LossTableTest, IsTheSameInAnyOrder) {
  double results[2];
  const double losses[3] = {0.1, 1e16, -1e16};
  for (int reverse = 0; reverse < 2; ++reverse) {
    LossTable table(3, 8);
    for (int i = 0; i < 3; ++i) {
      const int rank = reverse == 1 ? 2 - i : i;
      if (const auto done = table.Add(rank, 0, losses[rank], 1, true, 0.1)) results[reverse] = done->loss;
    }
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(LossTableTest, KeepsABoundedNumberOfSteps) {
  LossTable table(2, 3);
  for (uint64_t step = 0; step < 5; ++step) table.Add(0, step, 1, 1, true, 0.1);
  EXPECT_FALSE(table.Add(1, 1, 1, 1, true, 0.1).has_value()) << "given up";
  EXPECT_TRUE(table.Add(1, 2, 1, 1, true, 0.1).has_value());
  EXPECT_TRUE(table.Add(1, 4, 1, 1, true, 0.1).has_value());
  table.Clear();
  // Nor more reports than four steps of all ranks, whichever ranks send them.
  constexpr uint32_t kRanks = 65536;
  LossTable wide(kRanks, 65);
  for (uint64_t step = 0; step < 5; ++step) {
    for (uint32_t rank = 1; rank < kRanks; ++rank) wide.Add(rank, step, 1, 1, true, 0.1);
  }
  EXPECT_FALSE(wide.Add(0, 0, 1, 1, true, 0.1).has_value()) << "given up";
  EXPECT_TRUE(wide.Add(0, 1, 1, 1, true, 0.1).has_value());
  table.Add(0, 0, 1, 1, true, 0.1);
  EXPECT_TRUE(table.Add(1, 0, 1, 1, true, 0.1).has_value());
}

}  // namespace
}  // namespace precondor

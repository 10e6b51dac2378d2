// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/step_progress.h"

#include <cmath>

#include "gtest/gtest.h"

namespace precondor {
namespace {

constexpr uint64_t kLeaseSteps = 10;

StepReport OneReport(uint32_t rank, uint64_t step, double loss) {
  return {.rank = rank, .step = step, .loss = loss, .finite = true};
}
absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

TEST(StepProgressTest, AStepIsFinishedOnceAllHaveReportedIt) {
  StepProgress progress(2, kLeaseSteps, false);
  EXPECT_FALSE(progress.begun());
  EXPECT_FALSE(progress.Report(OneReport(0, 0, 1), At(1)).has_value());
  EXPECT_TRUE(progress.begun());
  const auto first = progress.Report(OneReport(1, 0, 3), At(2));
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->loss.loss, 2.0);
  EXPECT_EQ(first->seconds, 0) << "not known of the first";
  EXPECT_EQ(progress.last_loss(), 2.0);
  progress.Report(OneReport(0, 1, 1), At(4));
  const auto second = progress.Report(OneReport(1, 1, 1), At(7));
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->seconds, 5);
  EXPECT_EQ(progress.last_step(), 1u);
}

TEST(StepProgressTest, AnEpochBeginsWithoutTheReportsOfTheOneBefore) {
  StepProgress progress(1, kLeaseSteps, false);
  ASSERT_TRUE(progress.Report(OneReport(0, 7, 1), At(1)).has_value());
  EXPECT_TRUE(progress.begun());
  progress.BeginEpoch();
  EXPECT_TRUE(progress.begun());
  EXPECT_EQ(progress.last_step(), 0u);
  const auto again = progress.Report(OneReport(0, 7, 1), At(2));
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->seconds, 0);
}

TEST(StepProgressTest, AStepIsPassedALeaseLater) {
  StepProgress progress(1, kLeaseSteps, false);
  progress.Report(OneReport(0, 14, 1), At(1));
  EXPECT_FALSE(progress.HasPassed(5));
  EXPECT_TRUE(progress.HasPassed(4));
}

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

// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/step_progress.h"

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

}  // namespace
}  // namespace precondor

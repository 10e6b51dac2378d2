// SPDX-License-Identifier: Apache-2.0
#include "server/policy/sealing.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

TEST(SealingTest, WaitsForEverybodyByDefault) {
  EXPECT_EQ(DecideSealing({.members = 4, .present = 3}).verdict, SealingVerdict::kWait);
  EXPECT_EQ(DecideSealing({.members = 4, .present = 3, .waited = absl::Hours(1000)}).verdict, SealingVerdict::kWait);
  EXPECT_EQ(DecideSealing({.members = 4, .present = 4}).verdict, SealingVerdict::kSeal);
}

TEST(SealingTest, AbstentionsCompleteButDoNotVote) {
  EXPECT_EQ(DecideSealing({.members = 4, .present = 1, .abstained = 3}).verdict, SealingVerdict::kSeal);
  EXPECT_EQ(DecideSealing({.members = 4, .present = 0, .abstained = 4}).verdict, SealingVerdict::kSkip);
}

TEST(SealingTest, SealsWithAQuorumAtTheDeadlineOnly) {
  SealingInput input{.members = 3, .present = 2, .quorum = 2.0 / 3, .deadline = absl::Seconds(5)};
  input.waited = absl::Seconds(4);
  EXPECT_EQ(DecideSealing(input).verdict, SealingVerdict::kWait);
  input.waited = absl::Seconds(5);
  EXPECT_EQ(DecideSealing(input).verdict, SealingVerdict::kSeal);
  input.present = 1;
  EXPECT_EQ(DecideSealing(input).verdict, SealingVerdict::kSkip);
}

TEST(SealingTest, NobodyIsNoQuorum) {
  EXPECT_EQ(DecideSealing(
                {.members = 3, .present = 0, .quorum = 0.01, .deadline = absl::Seconds(5), .waited = absl::Seconds(6)})
                .verdict,
            SealingVerdict::kSkip);
}

TEST(SealingTest, ReasonHasTheCounts) {
  EXPECT_THAT(DecideSealing({.members = 4, .present = 2, .abstained = 1}).reason,
              HasSubstr("2 contributions and 1 abstentions of 4"));
}

}  // namespace
}  // namespace precondor

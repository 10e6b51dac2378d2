// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/contributions.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/core/layer/step_window.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using enum ContributionStatus;

TEST(ContributionsTest, FirstWriteWins) {
  Contributions contributions(0, 3);
  EXPECT_EQ(contributions.Put(1, kPresent, 11), PutOutcome::kTaken);
  EXPECT_EQ(contributions.Put(1, kPresent, 11), PutOutcome::kDuplicate);
  EXPECT_EQ(contributions.Put(1, kPresent, 12), PutOutcome::kConflict);
  EXPECT_EQ(contributions.Put(1, kAbstained, 13), PutOutcome::kConflict);
  EXPECT_EQ(contributions.present(), 1);
  EXPECT_THAT(contributions.TakeRest(), ElementsAre(1));
}

TEST(ContributionsTest, RepetitionIsRecognisedAfterThePayloadWasTaken) {
  Contributions contributions(0, 1);
  contributions.Put(0, kPresent, 11);
  contributions.TakeRest();
  EXPECT_EQ(contributions.Put(0, kPresent, 11), PutOutcome::kDuplicate);
  EXPECT_EQ(contributions.Put(0, kPresent, 12), PutOutcome::kConflict);
}

TEST(ContributionsTest, RefusedPayloadMayBeFollowedByItsAbstention) {
  Contributions contributions(0, 2);
  EXPECT_EQ(contributions.Put(0, kRefused, 11), PutOutcome::kTaken);
  EXPECT_EQ(contributions.Put(0, kAbstained, 12), PutOutcome::kDuplicate);
  EXPECT_EQ(contributions.Put(0, kPresent, 13), PutOutcome::kConflict);
  EXPECT_EQ(contributions.abstained(), 1);
  EXPECT_EQ(contributions.present(), 0);
}

TEST(ContributionsTest, PayloadsLeaveInRankOrderAsFarAsTheOrderIsSettled) {
  Contributions contributions(0, 4);
  contributions.Put(2, kPresent, 1);
  EXPECT_FALSE(contributions.TakeNext().has_value());
  contributions.Put(0, kPresent, 2);
  EXPECT_EQ(contributions.TakeNext(), 0u);
  EXPECT_FALSE(contributions.TakeNext().has_value());
  contributions.Put(1, kAbstained, 3);
  EXPECT_EQ(contributions.TakeNext(), 2u);
  EXPECT_FALSE(contributions.TakeNext().has_value());
  contributions.Put(3, kPresent, 4);
  EXPECT_THAT(contributions.TakeRest(), ElementsAre(3));
}

TEST(ContributionsTest, AllRestoredLeaveNoPayloadAndEverythingElseIsARepetition) {
  Contributions contributions(0, 3);
  contributions.PutAllRestored();
  EXPECT_EQ(contributions.present(), 3);
  EXPECT_EQ(contributions.Put(1, kPresent, 5), PutOutcome::kDuplicate);
  EXPECT_EQ(contributions.Put(2, kAbstained, 6), PutOutcome::kDuplicate);
  EXPECT_EQ(contributions.owed_rank(), std::nullopt);
  EXPECT_FALSE(contributions.TakeNext().has_value());
  EXPECT_TRUE(contributions.TakeRest().empty());
}

TEST(ContributionsTest, NamesTheLowestRankWhateverCameFirst) {
  Contributions contributions(0, 4);
  EXPECT_EQ(contributions.DescribeAbstention(), "");
  contributions.Put(3, kAbstained, 1);
  contributions.Put(1, kRefused, 2);
  contributions.Put(0, kPresent, 3);
  EXPECT_THAT(contributions.DescribeAbstention(), ::testing::HasSubstr("rank 1"));
}

TEST(ContributionsTest, MayHoldASingleRank) {
  Contributions contributions(5, 1);
  EXPECT_FALSE(contributions.has(5));
  contributions.Put(5, kPresent, 1);
  EXPECT_TRUE(contributions.has(5));
  EXPECT_EQ(contributions.count(), 1);
}

TEST(PhaseStateTest, GoesThroughItsStates) {
  EXPECT_EQ(NextState(PhaseState::kOpen, PhaseEvent::kSeal), PhaseState::kSealed);
  EXPECT_EQ(NextState(PhaseState::kSealed, PhaseEvent::kApply), PhaseState::kApplied);
  EXPECT_EQ(NextState(PhaseState::kApplied, PhaseEvent::kRetire), PhaseState::kRetired);
  EXPECT_EQ(NextState(PhaseState::kOpen, PhaseEvent::kRetire), PhaseState::kRetired);
}

TEST(PhaseStateDeathTest, RefusesEveryOtherWay) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(NextState(PhaseState::kSealed, PhaseEvent::kSeal), "CHECK");
  EXPECT_DEATH(NextState(PhaseState::kOpen, PhaseEvent::kApply), "CHECK");
  EXPECT_DEATH(NextState(PhaseState::kApplied, PhaseEvent::kApply), "CHECK");
  EXPECT_DEATH(NextState(PhaseState::kRetired, PhaseEvent::kSeal), "CHECK");
}

}  // namespace
}  // namespace precondor

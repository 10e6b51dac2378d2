// SPDX-License-Identifier: Apache-2.0
#include "server/core/gather.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/core/step_slot.h"

namespace precondor {
namespace {

Vote Of(uint64_t samples) { return Vote{.samples = samples}; }

TEST(GatherTest, FirstWriteWins) {
  Gather gather(0, 3);
  EXPECT_EQ(gather.Put(1, Standing::kVoted, 11, Of(5)), PutOutcome::kTaken);
  EXPECT_EQ(gather.Put(1, Standing::kVoted, 11, Of(6)), PutOutcome::kDuplicate);
  EXPECT_EQ(gather.Put(1, Standing::kVoted, 12, Of(7)), PutOutcome::kConflict);
  EXPECT_EQ(gather.Put(1, Standing::kAbstained, 13, {}), PutOutcome::kConflict);
  EXPECT_EQ(gather.voted(), 1);
  const std::vector<Vote> votes = gather.TakeRest();
  ASSERT_EQ(votes.size(), 1u);
  EXPECT_EQ(votes[0].samples, 5u);
}

TEST(GatherTest, RepetitionIsRecognisedAfterTheVoteWasTaken) {
  Gather gather(0, 1);
  gather.Put(0, Standing::kVoted, 11, Of(5));
  gather.TakeRest();
  EXPECT_EQ(gather.Put(0, Standing::kVoted, 11, Of(5)), PutOutcome::kDuplicate);
  EXPECT_EQ(gather.Put(0, Standing::kVoted, 12, Of(5)), PutOutcome::kConflict);
}

TEST(GatherTest, RefusedPayloadMayBeFollowedByItsAbstention) {
  Gather gather(0, 2);
  EXPECT_EQ(gather.Put(0, Standing::kRefused, 11, {}), PutOutcome::kTaken);
  EXPECT_EQ(gather.Put(0, Standing::kAbstained, 12, {}), PutOutcome::kDuplicate);
  EXPECT_EQ(gather.Put(0, Standing::kVoted, 13, Of(1)), PutOutcome::kConflict);
  EXPECT_EQ(gather.abstained(), 1);
  EXPECT_EQ(gather.voted(), 0);
}

TEST(GatherTest, VotesLeaveInRankOrderAsFarAsTheOrderIsSettled) {
  Gather gather(0, 4);
  gather.Put(2, Standing::kVoted, 1, Of(30));
  EXPECT_FALSE(gather.TakeNext().has_value());
  gather.Put(0, Standing::kVoted, 2, Of(10));
  EXPECT_EQ(gather.TakeNext()->samples, 10u);
  EXPECT_FALSE(gather.TakeNext().has_value());
  gather.Put(1, Standing::kAbstained, 3, {});
  EXPECT_EQ(gather.TakeNext()->samples, 30u);
  EXPECT_FALSE(gather.TakeNext().has_value());
  gather.Put(3, Standing::kVoted, 4, Of(40));
  const std::vector<Vote> rest = gather.TakeRest();
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].samples, 40u);
}

TEST(GatherTest, AllAtOnceLeaveOneVoteAndEverythingElseIsARepetition) {
  Gather gather(0, 3);
  gather.PutAll({Standing::kVoted, Standing::kVoted, Standing::kVoted}, Of(12));
  EXPECT_EQ(gather.voted(), 3);
  EXPECT_EQ(gather.Put(1, Standing::kVoted, 5, Of(5)), PutOutcome::kDuplicate);
  EXPECT_EQ(gather.Put(2, Standing::kAbstained, 6, {}), PutOutcome::kDuplicate);
  EXPECT_EQ(gather.owing(), std::nullopt);
  EXPECT_EQ(gather.TakeNext()->samples, 12u);
  EXPECT_FALSE(gather.TakeNext().has_value());
  EXPECT_TRUE(gather.TakeRest().empty());
}

TEST(GatherTest, AllAtOnceWithAnAbstentionLeaveNoVote) {
  Gather gather(0, 3);
  gather.PutAll({Standing::kVoted, Standing::kRefused, Standing::kAbstained}, Of(12));
  EXPECT_EQ(gather.voted(), 1);
  EXPECT_EQ(gather.abstained(), 2);
  EXPECT_EQ(gather.Culprit(), "rank 1 sent a payload that was not finite");
}

TEST(GatherTest, CulpritIsTheLowestRankWhateverCameFirst) {
  Gather gather(0, 4);
  EXPECT_EQ(gather.Culprit(), "");
  gather.Put(3, Standing::kAbstained, 1, {});
  gather.Put(1, Standing::kRefused, 2, {});
  gather.Put(0, Standing::kVoted, 3, Of(1));
  EXPECT_THAT(gather.Culprit(), ::testing::HasSubstr("rank 1"));
}

TEST(GatherTest, MayHoldASingleRank) {
  Gather gather(5, 1);
  EXPECT_FALSE(gather.has(5));
  gather.Put(5, Standing::kVoted, 1, Of(2));
  EXPECT_TRUE(gather.has(5));
  EXPECT_EQ(gather.count(), 1);
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

// SPDX-License-Identifier: Apache-2.0
// Ranks that were answered by a memory that is lost: what this one cannot complete holds nothing up, and no replica
// gets an answer that another had otherwise.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

class ShardResumeTest : public ShardFixture {
 protected:
  void StartDelegate() {
    spec.exchange = ExchangeMode::kDelegate;
    Start();
  }

  LossObserver counted_;
};

TEST_F(ShardResumeTest, StatisticsOfAStepThatWasAnsweredBeforeHoldNothingUp) {
  StartDelegate();
  // Rank 1 sends again what it keeps; rank 0, which has the answers, keeps nothing of step 3 any more.
  EXPECT_TRUE(Statistics(4, 1, 1)->accepted());
  const std::shared_ptr<Reply> waiting = SendStep(5)[0];
  EXPECT_TRUE(waiting->accepted());
  EXPECT_FALSE(waiting->answered());
  EXPECT_TRUE(Resume(5, 0, 7).ok());
  EXPECT_EQ(waiting->decision(), Decision::kPreconditioned);
  EXPECT_EQ(waiting->version(), 1u);
  EXPECT_TRUE(Statistics(4, 0, 1)->duplicate());
  EXPECT_TRUE(Statistics(3, 1, 1)->duplicate());
  EXPECT_EQ(Gradient(4, 0, 1)->reason(), ErrorReason::kStaleStep);
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardResumeTest, StatisticsThatAllHaveSentAgainCountAndTheirStepLeavesTheWindow) {
  StartDelegate();
  for (uint32_t rank : {0u, 1u}) EXPECT_TRUE(Statistics(4, rank, 1)->accepted());
  EXPECT_TRUE(Resume(5, 0, 7).ok());
  for (uint64_t step = 5; step < 9; ++step) {
    EXPECT_EQ(SendStep(step)[0]->version(), step - 3);
    EXPECT_EQ(shard->in_flight(), 0);
  }
}

TEST_F(ShardResumeTest, TellsHowManyUpdatesAreLost) {
  spec.exchange = ExchangeMode::kDelegate;
  Start(counted_);
  SendStep(5);
  EXPECT_TRUE(Resume(5, 0, 1).ok());
  EXPECT_EQ(counted_.lost, 0);
  EXPECT_TRUE(Resume(5, 0, 7).ok());
  EXPECT_EQ(counted_.lost, 6);
  EXPECT_TRUE(Resume(5, 1, 7).ok());
  EXPECT_EQ(counted_.lost, 6) << "the same updates";
  EXPECT_TRUE(Resume(5, 1, 8).ok());
  EXPECT_EQ(counted_.lost, 7);
}

TEST_F(ShardResumeTest, TellsAProcessThatTookItsRankOverToo) {
  spec.exchange = ExchangeMode::kDelegate;
  Start(counted_);
  SendStep(5);
  const auto begin = [this](uint32_t rank, uint64_t version) {
    return shard->data_plane().Resume({.key = Header(ContributionKind::kGradient, 6, rank).key,
                                       .factor_version = version,
                                       .next_step = 6,
                                       .begins = true});
  };
  EXPECT_EQ(*begin(0, 1), 0u) << "the factors are those of its checkpoint, or later";
  EXPECT_EQ(*begin(0, 0), 0u) << "it does not know";
  EXPECT_EQ(*begin(0, 7), 6u);
  EXPECT_EQ(counted_.lost, 6);
  EXPECT_EQ(*begin(1, 7), 6u);
  EXPECT_EQ(counted_.lost, 6) << "the same updates";
  for (const auto& reply : SendStep(6)) EXPECT_TRUE(reply->answered());
}

TEST_F(ShardResumeTest, WhatThisMemoryHasAnsweredStays) {
  StartDelegate();
  const std::vector<float> values = SendStep(5)[0]->values();
  // The stream broke before the answer had come, or after: both may be said to the same memory.
  EXPECT_TRUE(Resume(6, 0, 1).ok());
  const std::shared_ptr<Reply> again = Gradient(5, 0, 1);
  EXPECT_TRUE(again->duplicate());
  EXPECT_EQ(again->values(), values);
}

TEST_F(ShardResumeTest, RanksThatSendNoGradientEndNothing) {
  StartDelegate();
  EXPECT_TRUE(Statistics(3, 1, 1)->accepted());
  EXPECT_TRUE(Resume(9, 1, 0).ok());
  Statistics(3, 0, 1);
  EXPECT_EQ(Gradient(3, 0, 1)->decision(), Decision::kPreconditioned);
}

TEST_F(ShardResumeTest, ReplicasThatWouldGetOtherAnswersBeginAgainAllOfThem) {
  Start();
  // Rank 0 has the answer of step 5, with three updates; rank 1 has not.
  const std::shared_ptr<Reply> waiting = Gradient(5, 1, 1);
  EXPECT_THAT(Resume(5, 0, 3, /*next_step=*/6), StatusIs(absl::StatusCode::kDataLoss, ErrorReason::kStateLost,
                                                         HasSubstr("go back to a checkpoint with all ranks")));
  EXPECT_EQ(Gradient(5, 0, 1)->reason(), ErrorReason::kStateLost);
  EXPECT_EQ(Statistics(5, 1, 1)->reason(), ErrorReason::kStateLost);
  EXPECT_EQ(GetErrorReason(Resume(4, 1, 2).status()), ErrorReason::kStateLost);
  EXPECT_FALSE(waiting->answered() && waiting->result->ok());

  // The first that begins again waits for the other.
  Replace({0}, 4);
  EXPECT_EQ(Statistics(4, 0, 1)->reason(), ErrorReason::kNotActive);
  EXPECT_EQ(Statistics(4, 1, 1)->reason(), ErrorReason::kStateLost);
  Replace({1}, 4);
  for (const auto& reply : SendStep(4)) EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
}

TEST_F(ShardResumeTest, AnAverageIsTheSameFromAnyMemory) {
  needs_statistics = false;
  Start();
  // Rank 0 keeps its gradient of step 5 for the others.
  EXPECT_TRUE(Gradient(4, 1, 1)->accepted());
  EXPECT_TRUE(Resume(5, 0, 0).ok());
  EXPECT_TRUE(Gradient(5, 0, 1)->accepted());
  EXPECT_TRUE(Gradient(5, 1, 1)->outcome().ok());
  EXPECT_EQ(Gradient(4, 1, 1)->reason(), ErrorReason::kStaleStep);
}

TEST_F(ShardResumeTest, AProcessThatBeginsLaterPassesOverWhatItCannotRepeat) {
  Start();
  // Rank 0 was lost with its gradient of step 5, and its checkpoint lies after it.
  Statistics(5, 1, 1);
  Gradient(5, 1, 1);
  Replace({0}, 6);
  const std::shared_ptr<Reply> waiting = Gradient(5, 1, 1);
  EXPECT_TRUE(waiting->duplicate());
  EXPECT_FALSE(waiting->answered());
  Statistics(6, 0, 1);
  EXPECT_EQ(GetErrorReason(waiting->outcome()), ErrorReason::kStaleStep);
  EXPECT_EQ(Gradient(5, 1, 1)->reason(), ErrorReason::kStaleStep);
  for (const std::shared_ptr<Reply>& answer : SendStep(6)) EXPECT_TRUE(answer->answered());
}

TEST_F(ShardResumeTest, StatisticsThatAProcessDidNotGetThroughAreGivenUp) {
  StartDelegate();
  EXPECT_TRUE(Statistics(5, 0, 1)->accepted());
  Replace({1}, 6);
  const std::shared_ptr<Reply> waiting = Gradient(5, 0, 1);
  EXPECT_FALSE(waiting->answered());
  EXPECT_TRUE(Statistics(6, 1, 1)->accepted());
  EXPECT_TRUE(waiting->answered());
  Statistics(6, 0, 1);
  EXPECT_TRUE(Gradient(6, 0, 1)->outcome().ok());
}

TEST_F(ShardResumeTest, ASessionThatIsNewHereBeginsWhereItsRanksDo) {
  spec.exchange = ExchangeMode::kDelegate;
  MakeShard();
  SessionInstall install = MakeInstall();
  install.members[0].first_step = 5;
  ASSERT_TRUE(shard->Install(install).ok());
  EXPECT_TRUE(Statistics(4, 1, 1)->accepted());
  EXPECT_TRUE(SendStep(5)[0]->answered());
  EXPECT_TRUE(Statistics(4, 1, 1)->duplicate());
}

// The trainers have agreed on an earlier checkpoint than the one that rank 0 joined with.
TEST_F(ShardResumeTest, AProcessThatBeginsEarlierThanItSaidTakesAllAlong) {
  Start();
  SendStep(5);
  Replace({0, 1}, 6);
  EXPECT_FALSE(Statistics(4, 0, 1)->duplicate());
  for (const std::shared_ptr<Reply>& answer : SendStep(4)) EXPECT_TRUE(answer->answered());
}

TEST_F(ShardResumeTest, ChecksWhoSpeaksOfWhat) {
  Start();
  ContributionKey key = Header(ContributionKind::kGradient, 5, 0).key;
  const auto reason = [&](auto change) {
    ContributionKey changed = key;
    change(changed);
    return GetErrorReason(shard->data_plane().Resume({.key = changed}).status());
  };
  EXPECT_EQ(reason([](ContributionKey& bad) { bad.session_id = 99; }), ErrorReason::kUnknownSession);
  EXPECT_EQ(reason([](ContributionKey& bad) { bad.epoch = 0; }), ErrorReason::kStaleEpoch);
  EXPECT_EQ(reason([](ContributionKey& bad) { bad.epoch = 2; }), ErrorReason::kFutureEpoch);
  EXPECT_EQ(reason([](ContributionKey& bad) { bad.rank = 2; }), ErrorReason::kUnknownRank);
  EXPECT_EQ(reason([](ContributionKey& bad) { bad.incarnation = 2; }), ErrorReason::kUnknownRank);
  EXPECT_EQ(reason([](ContributionKey& bad) { bad.layer = 2; }), ErrorReason::kUnknownLayer);
}

TEST_F(ShardResumeTest, AStreamIsOfTheMemoryInWhichItBegan) {
  Start();
  const uint64_t id = MakeInstall().session_id;
  EXPECT_EQ(shard->data_plane().state_generation(), 0u);
  EXPECT_TRUE(shard->data_plane().CheckGeneration(id, 0).ok());
  ASSERT_TRUE(shard->Remove(id).value());
  EXPECT_TRUE(shard->data_plane().CheckGeneration(id, 0).ok()) << "to say so is another check's business";
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  EXPECT_EQ(shard->data_plane().state_generation(), 1u);
  EXPECT_THAT(shard->data_plane().CheckGeneration(id, 0),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("removed and installed again")));
  EXPECT_TRUE(shard->data_plane().CheckGeneration(id, 1).ok());
  // A frame that passed the check before the install: its rank sends no RESUME on this stream.
  const ContributionKey key = Header(ContributionKind::kGradient, 5, 0).key;
  const SessionCaller on_old_stream{.stream_generation = 0}, on_new_stream{.stream_generation = 1};
  EXPECT_THAT(shard->data_plane().MissingRanks(key, on_old_stream),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("removed and installed again")));
  EXPECT_TRUE(shard->data_plane().MissingRanks(key, on_new_stream).ok());
  // Others have lost nothing, nor do repetitions of the install.
  SessionInstall other = MakeInstall();
  other.session_id = id + 1;
  other.spec.name = "another";
  ASSERT_TRUE(shard->Install(other).ok());
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  EXPECT_EQ(shard->data_plane().state_generation(), 1u);
  EXPECT_TRUE(shard->data_plane().CheckGeneration(other.session_id, 0).ok());
}

}  // namespace
}  // namespace precondor

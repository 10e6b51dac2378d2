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
  absl::Status Resume(uint64_t step, uint32_t rank, uint64_t factor_version, uint64_t next_step) {
    return shard->data_plane()
        .Resume({.key = Header(ContributionKind::kGradient, step, rank).key,
                 .factor_version = factor_version,
                 .next_step = next_step})
        .status();
  }
  absl::Status Resume(uint64_t step, uint32_t rank, uint64_t factor_version) {
    return Resume(step, rank, factor_version, step);
  }
  void StartDelegate() {
    spec.exchange = ExchangeMode::kDelegate;
    Start();
  }
  // Both ranks' statistics, and the gradients of those that send one.
  std::vector<std::shared_ptr<Reply>> SendStep(uint64_t step) {
    for (uint32_t rank : {0u, 1u}) Statistics(step, rank, 1);
    std::vector<std::shared_ptr<Reply>> gradients = {Gradient(step, 0, 1)};
    if (spec.exchange == ExchangeMode::kDirect) gradients.push_back(Gradient(step, 1, 1));
    return gradients;
  }
  // Takes ranks over with another process.
  absl::Status Replace(const std::vector<uint32_t>& ranks, uint64_t first_step) {
    ++epoch;
    for (const uint32_t rank : ranks) incarnations[rank] = Holder(rank) + 1;
    SessionInstall install = MakeInstall(epoch);
    for (const uint32_t rank : ranks) install.members[rank].first_step = first_step;
    return shard->Install(install).status();
  }

  LossObserver observer_;
};

TEST_F(ShardResumeTest, StatisticsOfAStepThatWasAnsweredBeforeHoldNothingUp) {
  StartDelegate();
  // Rank 1 sends again what it keeps; rank 0, which has the answers, keeps nothing of step 3 any more.
  EXPECT_TRUE(Statistics(4, 1, 1)->accepted());
  const std::shared_ptr<Reply> waiting = SendStep(5)[0];
  EXPECT_TRUE(waiting->accepted());
  EXPECT_FALSE(waiting->result.has_value());
  EXPECT_TRUE(Resume(5, 0, 7).ok());
  ASSERT_TRUE(waiting->result.has_value());
  EXPECT_EQ(waiting->decision(), Decision::kPreconditioned);
  EXPECT_EQ((*waiting->result)->factor_version, 1u);
  EXPECT_TRUE(Statistics(4, 0, 1)->duplicate());
  EXPECT_TRUE(Statistics(3, 1, 1)->duplicate());
  EXPECT_EQ(Gradient(4, 0, 1)->reason(), ErrorReason::kStaleStep);
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardResumeTest, StatisticsThatAllHaveSentAgainCount) {
  StartDelegate();
  for (uint32_t rank : {0u, 1u}) EXPECT_TRUE(Statistics(4, rank, 1)->accepted());
  EXPECT_TRUE(Resume(5, 0, 7).ok());
  const std::shared_ptr<Reply> answered = SendStep(5)[0];
  ASSERT_TRUE(answered->result.has_value());
  EXPECT_EQ((*answered->result)->factor_version, 2u);
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardResumeTest, AStepWhoseStatisticsAloneCountLeavesTheWindow) {
  StartDelegate();
  for (uint32_t rank : {0u, 1u}) EXPECT_TRUE(Statistics(4, rank, 1)->accepted());
  EXPECT_TRUE(Resume(5, 0, 7).ok());
  for (const uint64_t step : {5, 6, 7, 8}) EXPECT_TRUE(SendStep(step)[0]->result.has_value()) << step;
}

TEST_F(ShardResumeTest, TellsHowManyUpdatesAreLost) {
  spec.exchange = ExchangeMode::kDelegate;
  shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, observer_);
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  SendStep(5);
  EXPECT_TRUE(Resume(5, 0, 1).ok());
  EXPECT_EQ(observer_.lost, 0);
  EXPECT_TRUE(Resume(5, 0, 7).ok());
  EXPECT_EQ(observer_.lost, 6);
  EXPECT_TRUE(Resume(5, 1, 7).ok());
  EXPECT_EQ(observer_.lost, 6) << "the same updates";
  EXPECT_TRUE(Resume(5, 1, 8).ok());
  EXPECT_EQ(observer_.lost, 7);
}

TEST_F(ShardResumeTest, WhatThisMemoryHasAnsweredStays) {
  StartDelegate();
  const std::shared_ptr<Reply> first = SendStep(5)[0];
  ASSERT_TRUE(first->result.has_value());
  // The stream broke before the answer had come, or after: both may be said to the same memory.
  EXPECT_TRUE(Resume(6, 0, 1).ok());
  const std::shared_ptr<Reply> again = Gradient(5, 0, 1);
  EXPECT_TRUE(again->duplicate());
  EXPECT_EQ(again->values(), first->values());
}

TEST_F(ShardResumeTest, RanksThatSendNoGradientEndNothing) {
  StartDelegate();
  EXPECT_TRUE(Statistics(3, 1, 1)->accepted());
  EXPECT_TRUE(Resume(9, 1, 0).ok());
  Statistics(3, 0, 1);
  const std::shared_ptr<Reply> answered = Gradient(3, 0, 1);
  ASSERT_TRUE(answered->result.has_value());
  EXPECT_EQ(answered->decision(), Decision::kPreconditioned);
}

TEST_F(ShardResumeTest, ReplicasThatWouldGetOtherAnswersBeginAgainAllOfThem) {
  Start();
  // Rank 0 has the answer of step 5, with three updates; rank 1 has not.
  const std::shared_ptr<Reply> waiting = Gradient(5, 1, 1);
  const absl::Status lost = Resume(5, 0, 3, /*next_step=*/6);
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(GetErrorReason(lost), ErrorReason::kStateLost);
  EXPECT_THAT(std::string(lost.message()), HasSubstr("go back to a checkpoint with all ranks"));
  EXPECT_EQ(Gradient(5, 0, 1)->reason(), ErrorReason::kStateLost);
  EXPECT_EQ(Statistics(5, 1, 1)->reason(), ErrorReason::kStateLost);
  EXPECT_EQ(GetErrorReason(Resume(4, 1, 2)), ErrorReason::kStateLost);
  EXPECT_FALSE(waiting->result.has_value() && waiting->result->ok());

  // The first that begins again waits for the other.
  ASSERT_TRUE(Replace({0}, 4).ok());
  EXPECT_EQ(Statistics(4, 0, 1)->reason(), ErrorReason::kNotActive);
  EXPECT_EQ(Statistics(4, 1, 1)->reason(), ErrorReason::kStateLost);
  ASSERT_TRUE(Replace({1}, 4).ok());
  const auto answers = SendStep(4);
  for (const std::shared_ptr<Reply>& answer : answers) {
    ASSERT_TRUE(answer->result.has_value());
    EXPECT_EQ(answer->decision(), Decision::kPreconditioned);
  }
}

TEST_F(ShardResumeTest, AnAverageIsTheSameFromAnyMemory) {
  needs_statistics = false;
  Start();
  // Rank 0 keeps its gradient of step 5 for the others.
  EXPECT_TRUE(Gradient(4, 1, 1)->accepted());
  EXPECT_TRUE(Resume(5, 0, 0).ok());
  EXPECT_TRUE(Gradient(5, 0, 1)->accepted());
  const std::shared_ptr<Reply> answered = Gradient(5, 1, 1);
  ASSERT_TRUE(answered->result.has_value());
  EXPECT_TRUE(answered->result->ok());
  EXPECT_EQ(Gradient(4, 1, 1)->reason(), ErrorReason::kStaleStep);
}

TEST_F(ShardResumeTest, AProcessThatBeginsLaterPassesOverWhatItCannotRepeat) {
  Start();
  // Rank 0 was lost with its gradient of step 5, and its checkpoint lies after it.
  Statistics(5, 1, 1);
  Gradient(5, 1, 1);
  ASSERT_TRUE(Replace({0}, 6).ok());
  const std::shared_ptr<Reply> waiting = Gradient(5, 1, 1);
  EXPECT_TRUE(waiting->duplicate());
  EXPECT_FALSE(waiting->result.has_value());
  Statistics(6, 0, 1);
  ASSERT_TRUE(waiting->result.has_value());
  EXPECT_EQ(GetErrorReason(waiting->result->status()), ErrorReason::kStaleStep);
  EXPECT_EQ(Gradient(5, 1, 1)->reason(), ErrorReason::kStaleStep);
  for (const std::shared_ptr<Reply>& answer : SendStep(6)) EXPECT_TRUE(answer->result.has_value());
}

TEST_F(ShardResumeTest, StatisticsThatAProcessDidNotGetThroughAreGivenUp) {
  StartDelegate();
  EXPECT_TRUE(Statistics(5, 0, 1)->accepted());
  ASSERT_TRUE(Replace({1}, 6).ok());
  const std::shared_ptr<Reply> waiting = Gradient(5, 0, 1);
  EXPECT_FALSE(waiting->result.has_value());
  EXPECT_TRUE(Statistics(6, 1, 1)->accepted());
  EXPECT_TRUE(waiting->result.has_value());
  Statistics(6, 0, 1);
  const std::shared_ptr<Reply> answered = Gradient(6, 0, 1);
  ASSERT_TRUE(answered->result.has_value());
  EXPECT_TRUE(answered->result->ok());
}

TEST_F(ShardResumeTest, ASessionThatIsNewHereBeginsWhereItsRanksDo) {
  spec.exchange = ExchangeMode::kDelegate;
  MakeShard();
  SessionInstall install = MakeInstall();
  install.members[0].first_step = 5;
  ASSERT_TRUE(shard->Install(install).ok());
  EXPECT_TRUE(Statistics(4, 1, 1)->accepted());
  EXPECT_TRUE(SendStep(5)[0]->result.has_value());
  EXPECT_TRUE(Statistics(4, 1, 1)->duplicate());
}

// The trainers have agreed on an earlier checkpoint than the one that rank 0 joined with.
TEST_F(ShardResumeTest, AProcessThatBeginsEarlierThanItSaidTakesAllAlong) {
  Start();
  SendStep(5);
  ASSERT_TRUE(Replace({0, 1}, 6).ok());
  EXPECT_FALSE(Statistics(4, 0, 1)->duplicate());
  for (const std::shared_ptr<Reply>& answer : SendStep(4)) EXPECT_TRUE(answer->result.has_value());
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
  const absl::Status former = shard->data_plane().CheckGeneration(id, 0);
  EXPECT_TRUE(absl::IsUnavailable(former)) << former;
  EXPECT_THAT(std::string(former.message()), HasSubstr("removed and installed again"));
  EXPECT_TRUE(shard->data_plane().CheckGeneration(id, 1).ok());
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

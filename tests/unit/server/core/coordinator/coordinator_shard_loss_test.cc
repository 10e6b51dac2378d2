// SPDX-License-Identifier: Apache-2.0
// What a coordinator does about a shard that is lost.
#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ShardLossTest : public CoordinatorFixture {
 protected:
  ShardLossTest() {
    shards.push_back(std::make_shared<FakeShard>());
    options.shard_loss_timeout = absl::Seconds(10);
    MakeCoordinator();
    spec.on_shard_loss = ShardLossPolicy::kDegrade;
    spec.exchange = ExchangeMode::kDelegate;
    for (int i = 4; i < 6; ++i) {
      spec.layers.push_back({.name = "l" + std::to_string(i), .d_out = 4, .d_in = 4, .has_bias = false});
    }
  }
  uint64_t OpenAndJoin() {
    const uint64_t id = Open();
    for (uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(coordinator->JoinSession("job", rank, 5, 0).ok());
    }
    return id;
  }
  // Rounds of a second each, as a server makes them.
  void Reconcile(int rounds) {
    for (int i = 0; i < rounds; ++i) {
      coordinator->Reconcile();
      clock.Advance(absl::Seconds(1));
    }
  }
  std::vector<uint32_t> LayersOf(size_t shard, uint64_t id) const {
    const auto found = shards[shard]->installed.find(id);
    return found == shards[shard]->installed.end() ? std::vector<uint32_t>() : found->second.layers;
  }
};

TEST_F(ShardLossTest, AShardThatDoesNotAnswerIsReportedOnceAndWhenItAnswersAgain) {
  shards[1]->down = shards[2]->down = true;
  Reconcile(2);
  EXPECT_THAT(logger.lines, IsEmpty()) << "two probes may be lost";
  EXPECT_EQ(observer.unreachable, 0);
  Reconcile(5);
  EXPECT_THAT(logger.lines, ElementsAre("shard does not answer shard1", "shard does not answer shard2"));
  EXPECT_EQ(observer.unreachable, 2);
  shards[1]->down = false;
  Reconcile(3);
  EXPECT_THAT(logger.lines, ElementsAre("shard does not answer shard1", "shard does not answer shard2",
                                        "shard answers again shard1"));
  EXPECT_EQ(observer.unreachable, 1);
}

// Equal layers on equal shards: 0 and 3 on the first, 1 and 4 on the second, 2 and 5 on the third.
TEST_F(ShardLossTest, LayersGoToTheSurvivorsInANewEpoch) {
  const uint64_t id = OpenAndJoin();
  ASSERT_THAT(LayersOf(1, id), ElementsAre(1, 4));
  Reconcile(1);
  shards[1]->down = true;
  clock.SetWall(absl::Hours(1000));  // has no part in it
  Reconcile(9);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u) << "it may come back";
  clock.SetWall(-absl::Hours(2000));
  Reconcile(2);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 2u);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 1, 3));
  EXPECT_THAT(LayersOf(2, id), ElementsAre(2, 4, 5));
  for (const size_t s : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(shards[s]->installed[id].epoch, 2u);
    EXPECT_THAT(shards[s]->fences, ElementsAre(2)) << "before any shard begins the epoch";
    EXPECT_EQ(shards[s]->installed[id].rollback_epoch, 0u) << "the job goes on";
    EXPECT_EQ(shards[s]->installed[id].members.size(), 2u);
  }
  EXPECT_EQ(observer.moved, 2);
  // Workers that ask are sent there.
  const auto joined = coordinator->JoinSession("job", 0, 5, 0);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->epoch, 2u);
  EXPECT_TRUE(joined->active);
  ASSERT_EQ(joined->shard_map.size(), 2u);
  EXPECT_EQ(joined->shard_map[0].address, "shard0");
  EXPECT_THAT(joined->shard_map[0].layers, ElementsAre(0, 1, 3));
  EXPECT_EQ(joined->shard_map[1].address, "shard2");
  // No step had to be given up.
  EXPECT_EQ(joined->directive.rollback_epoch, 0u);
}

// Owners of gradients must not change while some ranks have sent a step and others have not.
TEST_F(ShardLossTest, LayersThatMoveKeepTheirDelegates) {
  for (size_t s = 0; s < 3; ++s) shards[s]->ring_device = absl::StrCat("device ", s);
  const std::vector<std::string> rank_devices = {"device 1", "device 0"};
  ASSERT_TRUE(coordinator->OpenSession(spec, {}, rank_devices).ok());
  const uint64_t id = OpenAndJoin();
  const std::vector<uint32_t> delegates = {1, 0, 0, 1, 0, 1};  // layers 2 and 5 are on no rank's device
  EXPECT_EQ(shards[0]->installed[id].spec.delegates, delegates);
  shards[1]->down = true;
  Reconcile(12);
  ASSERT_THAT(LayersOf(0, id), ElementsAre(0, 1, 3));
  EXPECT_EQ(shards[0]->installed[id].spec.delegates, delegates);
  EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 0)->spec.delegates, delegates);
}

TEST_F(ShardLossTest, AShardThatReturnsIsRidOfTheSession) {
  const uint64_t id = OpenAndJoin();
  shards[1]->down = true;
  Reconcile(12);
  ASSERT_TRUE(shards[1]->installed.contains(id));
  shards[1]->down = false;
  Reconcile(1);
  EXPECT_FALSE(shards[1]->installed.contains(id));
  Reconcile(20);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 2u) << "layers are not moved back";
  EXPECT_THAT(LayersOf(1, id), IsEmpty());
}

TEST_F(ShardLossTest, AShardThatIsLostKeepsNoSessionFromEnding) {
  const uint64_t id = OpenAndJoin();
  shards[1]->down = true;
  Reconcile(9);
  EXPECT_FALSE(coordinator->CloseSession("job").ok()) << "it may come back";
  Reconcile(3);
  EXPECT_TRUE(*coordinator->CloseSession("job"));
  EXPECT_TRUE(shards[1]->installed.contains(id));
  shards[1]->down = false;
  Reconcile(1);
  EXPECT_FALSE(shards[1]->installed.contains(id));
}

TEST_F(ShardLossTest, ASessionThatWaitsIsLeftAlone) {
  spec.on_shard_loss = ShardLossPolicy::kWait;
  const uint64_t id = OpenAndJoin();
  shards[1]->down = true;
  Reconcile(30);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
  EXPECT_EQ(coordinator->GetSession("job")->shard_map.size(), 3u);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 3));
}

TEST_F(ShardLossTest, AnAnswerInBetweenBeginsTheWaitAnew) {
  OpenAndJoin();
  for (int i = 0; i < 5; ++i) {
    shards[1]->down = true;
    Reconcile(8);
    shards[1]->down = false;
    Reconcile(1);
  }
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
}

TEST_F(ShardLossTest, ACoordinatorThatWasStoppedAsksBeforeItJudges) {
  OpenAndJoin();
  Reconcile(1);
  clock.Advance(absl::Hours(1));
  Reconcile(1);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
}

// Its connections may have ended meanwhile, so that its first probes fail although the shards are well.
TEST_F(ShardLossTest, TimeWithoutProbesIsNoSilence) {
  OpenAndJoin();
  Reconcile(1);
  for (int pause = 0; pause < 3; ++pause) {
    clock.Advance(absl::Hours(1));
    for (const auto& shard : shards) shard->down = true;
    Reconcile(2);
    coordinator->ProbeShard(1);
    coordinator->ProbeShard(1);  // at one instant: no more silence than one
    coordinator->Reconcile();
    EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u) << "pause " << pause;
    for (const auto& shard : shards) shard->down = false;
    Reconcile(1);
  }
  EXPECT_EQ(observer.moved, 0);
}

TEST_F(ShardLossTest, SilenceIsCountedInProbesWhoeverSendsThem) {
  OpenAndJoin();
  Reconcile(1);
  shards[1]->down = true;
  // As many as ten intervals would bring, in no time.
  for (int i = 0; i < 20; ++i) coordinator->ProbeShard(1);
  clock.Advance(absl::Seconds(10));
  Reconcile(1);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
  for (int i = 0; i < 8; ++i) {
    coordinator->ProbeShard(1);
    clock.Advance(absl::Seconds(1));
  }
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
  Reconcile(2);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 2u);
}

TEST_F(ShardLossTest, WithoutRoomTheSessionWaitsAndTriesAgain) {
  const uint64_t id = OpenAndJoin();
  for (const size_t s : {size_t{0}, size_t{2}}) shards[s]->capacity = FakeShard::kSessionBytes;
  shards[1]->down = true;
  Reconcile(20);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 3));
  EXPECT_EQ(observer.moved, 0);
  shards[2]->capacity = int64_t{1} << 40;
  Reconcile(1);
  EXPECT_THAT(LayersOf(2, id), ElementsAre(1, 2, 4, 5));
}

TEST_F(ShardLossTest, ASecondLossMovesThemAgain) {
  const uint64_t id = OpenAndJoin();
  shards[1]->down = true;
  Reconcile(12);
  shards[0]->down = true;
  Reconcile(12);
  EXPECT_THAT(LayersOf(2, id), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_EQ(shards[2]->installed[id].epoch, 3u);
  shards[2]->down = true;
  Reconcile(12);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 3u) << "no shard is left to take them";
  EXPECT_EQ(coordinator->GetSession("job")->shard_map.size(), 1u);
}

TEST_F(ShardLossTest, TheMoveIsWrittenDownBeforeAnybodyHearsOfIt) {
  const uint64_t id = OpenAndJoin();
  const auto report = Report(id, 1, 0, 0, 1.0);
  ASSERT_TRUE(coordinator->ReportStep(report).ok());
  shards[1]->down = true;
  journal.fail = true;
  Reconcile(12);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 3));
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
  journal.fail = false;
  size_t told_while_written = 0;
  journal.during_append = [&](const CoordinatorRecord&) { told_while_written = LayersOf(0, id).size(); };
  Reconcile(1);
  journal.during_append = nullptr;
  EXPECT_EQ(told_while_written, 2u);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 1, 3));

  const uint64_t granted = coordinator->JoinSession("job", 0, 5, 0)->directive.lease_through_step;
  MakeCoordinator();
  ASSERT_TRUE(coordinator->Restore(journal.records).ok());
  const auto joined = coordinator->JoinSession("job", 0, 5, 0);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->epoch, 2u);
  ASSERT_EQ(joined->shard_map.size(), 2u);
  EXPECT_THAT(joined->shard_map[0].layers, ElementsAre(0, 1, 3));
  EXPECT_GE(joined->directive.lease_through_step, granted);
}

// The move may be on the disk although the write failed: epochs after it must not mean two maps.
TEST_F(ShardLossTest, AWriteThatFailedAndLandedMisleadsNobody) {
  OpenAndJoin();
  shards[1]->down = true;
  journal.fail = journal.lands = true;
  Reconcile(12);
  journal.fail = journal.lands = false;
  shards[1]->down = false;
  coordinator->ProbeShard(1);
  ASSERT_TRUE(coordinator->JoinSession("job", 0, 6, 0).ok());
  const auto before = coordinator->GetSession("job");
  EXPECT_EQ(before->epoch, 2u);
  EXPECT_EQ(before->shard_map.size(), 3u);
  MakeCoordinator();
  ASSERT_TRUE(coordinator->Restore(journal.records).ok());
  const auto after = coordinator->GetSession("job");
  EXPECT_EQ(after->epoch, 2u);
  ASSERT_EQ(after->shard_map.size(), 3u);
  EXPECT_THAT(after->shard_map[1].layers, ElementsAre(1, 4));
}

TEST_F(ShardLossTest, LayersThatAShardRefusesGoToAnother) {
  const uint64_t id = OpenAndJoin();
  shards[1]->down = true;
  shards[0]->most_layers = 2;  // of which its description says nothing
  Reconcile(12);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 3));
  EXPECT_THAT(LayersOf(2, id), ElementsAre(1, 2, 4, 5));
  const auto joined = coordinator->JoinSession("job", 0, 5, 0);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->epoch, 3u);
  EXPECT_EQ(shards[0]->installed[id].epoch, 3u);
  EXPECT_EQ(shards[2]->installed[id].epoch, 3u);
  EXPECT_EQ(observer.moved, 2) << "no layer counts twice";
}

TEST_F(ShardLossTest, LayersThatAllRefuseAreOfferedAgain) {
  const uint64_t id = OpenAndJoin();
  shards[1]->down = true;
  shards[0]->most_layers = shards[2]->most_layers = 2;
  Reconcile(15);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 3u) << "one epoch a shard, however often it is tried";
  EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 0).status().code(), absl::StatusCode::kResourceExhausted);
  shards[2]->most_layers = 4;
  Reconcile(1);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 3));
  EXPECT_THAT(LayersOf(2, id), ElementsAre(1, 2, 4, 5));
  EXPECT_TRUE(coordinator->JoinSession("job", 0, 5, 0).ok());
}

// A new owner that is lost before it has them.
TEST_F(ShardLossTest, LayersWhoseNewShardIsLostTooGoOn) {
  const uint64_t id = OpenAndJoin();
  shards[1]->down = true;
  Reconcile(10);
  shards[0]->during_install = [this] { shards[0]->down = true; };
  Reconcile(13);
  EXPECT_THAT(LayersOf(2, id), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_EQ(shards[2]->installed[id].epoch, 3u);
}

// A call to a shard that hangs holds the session's lock until it gives up.
TEST_F(ShardLossTest, AShardThatDoesNotAnswerIsNotWaitedFor) {
  OpenAndJoin();
  shards[1]->down = true;
  coordinator->ProbeShard(1);
  shards[1]->down = false;
  const absl::Status refused = coordinator->JoinSession("job", 0, 6, 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("\"job\""), HasSubstr("shard1: it does not answer")));
  EXPECT_THAT(shards[1]->fences, IsEmpty());
  coordinator->ProbeShard(1);
  EXPECT_TRUE(coordinator->JoinSession("job", 0, 6, 0).ok());
  EXPECT_THAT(shards[1]->fences, ElementsAre(2));
}

// Ranks that have the lost shard's answer to a step would differ from those that get its successor's.
TEST_F(ShardLossTest, DirectIsRefused) {
  spec.exchange = ExchangeMode::kDirect;
  const absl::Status refused = coordinator->OpenSession(spec).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("\"job\""), HasSubstr("exchange DIRECT and world_size 2"),
                                                    HasSubstr("expected exchange DELEGATE, or on_shard_loss WAIT")));
  spec.world_size = 1;
  EXPECT_TRUE(coordinator->OpenSession(spec).ok()) << "one rank agrees with itself";
}

TEST_F(ShardLossTest, ALeaseGrantsFromAnEarlierAnswer) {
  Reconcile(3);
  EXPECT_EQ(shards[0]->lease.duration, absl::Seconds(5));
  // The third probe, two seconds in, knows what the shard said a second before.
  EXPECT_EQ(shards[0]->lease.from, clock.Now() - absl::Seconds(2));
}

}  // namespace
}  // namespace precondor

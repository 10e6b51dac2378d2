// SPDX-License-Identifier: Apache-2.0
// What a coordinator does about a shard that does not answer.
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ShardLossTest : public CoordinatorFixture {
 protected:
  ShardLossTest() {
    shards.push_back(std::make_shared<FakeShard>());
    MakeCoordinator();
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
TEST_F(ShardLossTest, AShardThatReturnsWithNothingGetsItsLayersAgain) {
  const uint64_t id = OpenAndJoin();
  ASSERT_THAT(LayersOf(1, id), ElementsAre(1, 4));
  shards[1]->down = true;
  Reconcile(30);
  EXPECT_EQ(coordinator->GetSession("job")->epoch, 1u);
  EXPECT_EQ(coordinator->GetSession("job")->shard_map.size(), 3u);
  EXPECT_THAT(LayersOf(0, id), ElementsAre(0, 3));
  shards[1]->installed.clear();
  shards[1]->down = false;
  Reconcile(1);
  EXPECT_THAT(LayersOf(1, id), ElementsAre(1, 4));
  EXPECT_EQ(shards[1]->installed[id].epoch, 1u);
  EXPECT_EQ(shards[1]->installed[id].members.size(), 2u);
}

}  // namespace
}  // namespace precondor

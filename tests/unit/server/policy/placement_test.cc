// SPDX-License-Identifier: Apache-2.0
#include "server/policy/placement.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kPlenty = int64_t{1} << 40;

TEST(PlacementTest, LongestGoesFirstToTheLeastLoaded) {
  // By hand: 7 -> shard 0, 5 -> 1, 4 -> 1 (5 < 7), 3 -> 0 (7 < 9).
  const Placement placement =
      PlaceLayers({{3, 1}, {7, 1}, {4, 1}, {5, 1}}, {{.free_bytes = kPlenty}, {.free_bytes = kPlenty}});
  ASSERT_TRUE(placement.feasible);
  EXPECT_THAT(placement.shard_of_layer, ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(placement.load, ElementsAre(10.0, 9.0));
}

TEST(PlacementTest, TiesGoToTheLowerNumbers) {
  const Placement placement =
      PlaceLayers({{1, 1}, {1, 1}, {1, 1}, {1, 1}}, {{.free_bytes = kPlenty}, {.free_bytes = kPlenty}});
  EXPECT_THAT(placement.shard_of_layer, ElementsAre(0, 1, 0, 1));
}

TEST(PlacementTest, RespectsMemoryBeforeBalance) {
  const Placement placement = PlaceLayers({{9, 100}, {8, 100}, {1, 10}}, {{.free_bytes = 10}, {.free_bytes = 200}});
  ASSERT_TRUE(placement.feasible);
  EXPECT_THAT(placement.shard_of_layer, ElementsAre(1, 1, 0));
}

TEST(PlacementTest, SaysWhichLayerFitsNowhere) {
  const Placement placement = PlaceLayers({{1, 10}, {2, 500}}, {{.free_bytes = 100}, {.free_bytes = 200}});
  EXPECT_FALSE(placement.feasible);
  EXPECT_THAT(placement.shard_of_layer, ElementsAre());
  EXPECT_THAT(placement.reason, HasSubstr("layer 1 needs 500 bytes, all 2 layers 510;"));
  EXPECT_THAT(placement.reason, HasSubstr("200"));
  const std::vector<PlacementLayer> huge(3, {.cost = 1, .bytes = int64_t{1} << 62});
  EXPECT_THAT(PlaceLayers(huge, std::vector<PlacementShard>(1)).reason, HasSubstr("all 3 layers 9223372036854775807;"));
}

// Four shards; a layer costs as much as any other, so layer i is on shard i % 4.
std::vector<uint32_t> Delegates(const std::vector<std::string>& shards, const std::vector<std::string>& rank_devices) {
  std::vector<PlacementShard> rooms;
  for (const std::string& device : shards) rooms.push_back({.free_bytes = kPlenty, .ring_device = device});
  return DelegateByDevice(PlaceLayers(std::vector<PlacementLayer>(8, {1, 1}), rooms), rooms, rank_devices);
}

TEST(DelegateByDeviceTest, ARankOnTheLayersDeviceSendsIt) {
  EXPECT_THAT(Delegates({"a", "b", "c", "d"}, {"d", "c", "b", "a"}), ElementsAre(3, 2, 1, 0, 3, 2, 1, 0));
}

TEST(DelegateByDeviceTest, RanksOfOneDeviceTakeTurns) {
  EXPECT_THAT(Delegates({"a", "b", "a", "b"}, {"b", "a", "a"}), ElementsAre(1, 0, 2, 0, 1, 0, 2, 0));
}

TEST(DelegateByDeviceTest, LayersOfOtherDevicesKeepTheirRanks) {
  EXPECT_THAT(Delegates({"a", "", "c", "d"}, {"", "a", "e"}), ElementsAre(1, 1, 2, 0, 1, 2, 0, 1));
}

TEST(DelegateByDeviceTest, IsEmptyWithoutACommonDevice) {
  EXPECT_THAT(Delegates({"a", "b", "", ""}, {"c", ""}), ElementsAre());
  EXPECT_THAT(Delegates({"a", "b", "c", "d"}, {}), ElementsAre());
}

TEST(PlacementTest, NeedsAShard) { EXPECT_FALSE(PlaceLayers({{1, 1}}, {}).feasible); }

TEST(PlacementTest, StaysWithinGrahamsBoundOfTheMean) {
  // LPT's makespan is at most mean + the largest job.
  std::vector<PlacementLayer> layers;
  double total = 0;
  for (int i = 0; i < 144; ++i) {
    layers.push_back({.cost = 1.0 + (i * 37) % 11, .bytes = 1});
    total += layers.back().cost;
  }
  for (int shards = 1; shards <= 7; ++shards) {
    const Placement placement = PlaceLayers(layers, std::vector<PlacementShard>(shards, {.free_bytes = kPlenty}));
    ASSERT_TRUE(placement.feasible);
    EXPECT_LE(*std::max_element(placement.load.begin(), placement.load.end()), total / shards + 11.0);
    EXPECT_EQ(std::count(placement.shard_of_layer.begin(), placement.shard_of_layer.end(), -1), 0);
  }
}

}  // namespace
}  // namespace precondor

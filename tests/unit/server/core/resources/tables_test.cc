// SPDX-License-Identifier: Apache-2.0
// Costs, and what placement makes of them.
#include <cmath>
#include <memory>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/core/resources/cost_table.h"
#include "server/core/resources/placement_input.h"
#include "tests/support/fake_method.h"

namespace precondor {
namespace {

TEST(CostTableTest, MeansOverPreconditionedSteps) {
  CostTable table;
  const std::shared_ptr<CostTable::Entry> entry = table.Register("m{}", 2, 3);
  EXPECT_EQ(table.Register("m{}", 2, 3), entry);
  EXPECT_NE(table.Register("m{}", 3, 2), entry);
  EXPECT_TRUE(table.Snapshot().empty());
  table.RecordUpdate(*entry, 10.0);
  EXPECT_EQ(table.Snapshot().at(0).seconds_per_step, 10.0);
  for (int i = 0; i < 5; ++i) table.RecordPrecondition(*entry, 1.0);
  ASSERT_EQ(table.Snapshot().size(), 1u);
  EXPECT_EQ(table.Snapshot()[0].seconds_per_step, 3.0);
  table.RecordDeferred(*entry, 5.0);
  EXPECT_EQ(table.Snapshot()[0].seconds_per_step, 4.0);
}

TEST(CostTableTest, ForgetsWhatHasNotBeenRegisteredForLongest) {
  CostTable table;
  const auto most = static_cast<int64_t>(CostTable::kMostEntries);
  const std::shared_ptr<CostTable::Entry> forgotten = table.Register("m{}", 0, 1);
  for (int64_t d = 1; d < most; ++d) table.RecordUpdate(*table.Register("m{}", d, 1), 1.0);
  table.RecordUpdate(*table.Register("m{}", 1, 1), 1.0);     // registered again, and so later than 2
  table.RecordUpdate(*table.Register("m{}", most, 1), 1.0);  // in place of 0
  table.RecordUpdate(*forgotten, 1.0);                       // its layers may still record
  EXPECT_EQ(table.Snapshot().size(), CostTable::kMostEntries);
  table.RecordUpdate(*table.Register("m{}", most + 1, 1), 1.0);
  std::set<int64_t> kept;
  for (const MeasuredCost& cost : table.Snapshot()) kept.insert(cost.d_out);
  EXPECT_EQ(kept.count(0) + kept.count(2), 0u);
  EXPECT_EQ(kept.count(1) + kept.count(most + 1), 2u);
}

TEST(CostTableTest, MethodTextTellsConfigurationsApart) {
  const MethodConfig config{.name = "mkor", .options = {{"rank", 16.0}, {"rule", std::string("BLEND")}, {"on", true}}};
  EXPECT_EQ(MethodText(config), "mkor{on=true,rank=16,rule=BLEND}");
  EXPECT_EQ(MethodText({.name = "identity", .options = {}}), "identity{}");
}

TEST(PlacementInputTest, UsesMeasuredCostsAndScalesFlopsForTheRest) {
  SessionSpec spec;
  spec.method.name = "fake";
  spec.layers = {{.name = "seen", .d_out = 10, .d_in = 10, .has_bias = false},
                 {.name = "new", .d_out = 10, .d_in = 20, .has_bias = false}};
  const auto methods = MethodSet::Make(spec, [](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
    return std::make_unique<FakeMethod>(std::make_shared<FakeMethodLog>(), true);
  });
  ASSERT_TRUE(methods.ok()) << methods.status();
  const std::vector<PlacementLayer> unmeasured = EstimateLayers(spec, *methods, {});
  EXPECT_EQ(unmeasured[0].cost, 100);
  EXPECT_EQ(unmeasured[1].cost, 200);
  EXPECT_GT(unmeasured[1].bytes, unmeasured[0].bytes);
  const std::vector<MeasuredCost> costs = {
      {.method = "fake{}", .d_out = 10, .d_in = 10, .seconds_per_step = 2.0},
      {.method = "fake{}", .d_out = 10, .d_in = 10, .seconds_per_step = 4.0},
      {.method = "other{}", .d_out = 10, .d_in = 20, .seconds_per_step = 1000.0},
      {.method = "fake{}", .d_out = 1, .d_in = 1, .seconds_per_step = std::nan("")}};
  const std::vector<PlacementLayer> measured = EstimateLayers(spec, *methods, costs);
  EXPECT_DOUBLE_EQ(measured[0].cost, 3.0);
  EXPECT_DOUBLE_EQ(measured[1].cost, 200 * 0.03);
}

TEST(PlacementInputTest, EachLayerCostsWhatItsOwnMethodDoes) {
  SessionSpec spec;
  spec.method.name = "fake";
  spec.layers = {{.name = "own", .d_out = 10, .d_in = 10, .has_bias = false},
                 {.name = "other", .d_out = 10, .d_in = 10, .has_bias = false},
                 {.name = "unseen", .d_out = 10, .d_in = 20, .has_bias = false}};
  spec.layer_methods = {{.method = {.name = "other", .options = {}}, .layers = {1}},
                        {.method = {.name = "unseen", .options = {}}, .layers = {2}}};
  const auto methods = MethodSet::Make(spec, [](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
    return std::make_unique<FakeMethod>(std::make_shared<FakeMethodLog>(), true);
  });
  ASSERT_TRUE(methods.ok()) << methods.status();
  const std::vector<MeasuredCost> costs = {{.method = "fake{}", .d_out = 10, .d_in = 10, .seconds_per_step = 2.0},
                                           {.method = "other{}", .d_out = 10, .d_in = 10, .seconds_per_step = 6.0}};
  const std::vector<PlacementLayer> measured = EstimateLayers(spec, *methods, costs);
  EXPECT_DOUBLE_EQ(measured[0].cost, 2.0);
  EXPECT_DOUBLE_EQ(measured[1].cost, 6.0);
  EXPECT_DOUBLE_EQ(measured[2].cost, 200 * (0.02 + 0.06) / 2) << "all methods' mean seconds per FLOP";
}

TEST(DeviceRoomsTest, AreThoseOfTheDevicesOrOfTheWholeShard) {
  ShardDescription shard;
  shard.capacity_bytes = 100;
  shard.reserved_bytes = 30;
  std::vector<PlacementShard> rooms = DeviceRooms(shard, 6.0, 3);
  ASSERT_EQ(rooms.size(), 1u);
  EXPECT_EQ(rooms[0].free_bytes, 70);
  EXPECT_EQ(rooms[0].load, 6.0);
  shard.devices = {{.name = "a", .capacity_bytes = 50, .reserved_bytes = 30},
                   {.name = "b", .capacity_bytes = 50, .reserved_bytes = 0}};
  EXPECT_EQ(rooms[0].shard, 3u);
  rooms = DeviceRooms(shard, 6.0, 3);
  ASSERT_EQ(rooms.size(), 2u);
  EXPECT_EQ(rooms[0].free_bytes, 20);
  EXPECT_EQ(rooms[1].free_bytes, 50);
  EXPECT_EQ(rooms[0].load + rooms[1].load, 6.0);
  // Neither takes what only both together have room for.
  EXPECT_FALSE(PlaceLayers({{.cost = 1, .bytes = 60}}, rooms).feasible);
}

}  // namespace
}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// A shard with several devices: where layers go, what is reserved, and that the numbers are those of one device.
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "server/core/resources/placement_input.h"
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_devices_fixture.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using ShardDevicesTest = ShardDevicesFixture;

TEST_F(ShardDevicesTest, LayersGoToTheLeastLoadedDevice) {
  // By FLOP: e > d > c > b > a, and a device bears what it has.
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  const std::vector<PlacementLayer> costs = EstimateLayers(spec, MethodSet::Make(spec, options.make_method).value());
  double load[2] = {0, 0};
  std::vector<std::vector<uint32_t>> expected(2);
  for (const uint32_t layer : {4u, 3u, 2u, 1u, 0u}) {
    ASSERT_TRUE(layer == 4 || costs[layer + 1].cost > costs[layer].cost);
    const size_t device = load[1] < load[0] ? 1 : 0;
    load[device] += costs[layer].cost;
    expected[device].insert(expected[device].begin(), layer);
  }
  EXPECT_EQ(Where(), expected);
}

TEST_F(ShardDevicesTest, AnotherSessionGoesWhereThereIsRoomAndLittleToDo) {
  spec.layers.resize(1);
  ASSERT_TRUE(Make(3).Install(MakeInstall()).ok());
  for (uint64_t other = 1; other <= 2; ++other) {
    SessionInstall install = MakeInstall();
    install.session_id = kSession + other;
    install.spec.name = absl::StrCat("other", other);
    ASSERT_TRUE(shard->Install(install).ok());
  }
  EXPECT_THAT(Reserved(), ElementsAre(BytesOf({0}), BytesOf({0}), BytesOf({0})));
}

TEST_F(ShardDevicesTest, ReservesExactlyOnEachDevice) {
  Make(2);
  EXPECT_EQ(seen.whole, std::make_pair(int64_t{0}, 2 * options.capacity_bytes));
  const int64_t bytes = shard->Install(MakeInstall()).value();
  const auto where = Where();
  EXPECT_THAT(Reserved(), ElementsAre(BytesOf(where[0]), BytesOf(where[1])));
  EXPECT_EQ(bytes, BytesOf(where[0]) + BytesOf(where[1]));
  EXPECT_EQ(shard->memory()->reserved().total(), bytes);
  const ShardDescription description = shard->Describe().value();
  EXPECT_EQ(description.capacity_bytes, 2 * options.capacity_bytes);
  EXPECT_EQ(description.reserved_bytes, bytes);
  ASSERT_EQ(description.devices.size(), 2u);
  EXPECT_EQ(description.devices[1].name, "test:1");
  EXPECT_EQ(description.devices[1].reserved_bytes, BytesOf(where[1]));
  EXPECT_EQ(seen.devices["test:0"], std::make_pair(BytesOf(where[0]), options.capacity_bytes));
  EXPECT_EQ(seen.whole, std::make_pair(bytes, 2 * options.capacity_bytes));
  for (uint64_t step = 0; step < 6; ++step) Answers(step);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_GT(devices_[i]->backend->peak_bytes(), 0);
    EXPECT_LE(devices_[i]->backend->peak_bytes(), Reserved()[i]);
  }
  ASSERT_TRUE(*shard->Remove(kSession));
  EXPECT_THAT(Reserved(), ElementsAre(0, 0));
  for (const auto& device : devices_) EXPECT_EQ(device->backend->allocated_bytes(), 0);
}

// One session fits on two devices together and on neither alone. Another fits nowhere, and is refused with all numbers.
TEST_F(ShardDevicesTest, AdmitsWhatItsDevicesHoldAndRefusesWithTheNumbersOfEach) {
  for (LayerSpec& layer : spec.layers) layer.d_out = layer.d_in = 30;
  spec.layers.resize(3);
  options.capacity_bytes = BytesOf({0, 1});
  ASSERT_GT(BytesOf({0, 1, 2}), options.capacity_bytes);
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  ASSERT_TRUE(*shard->Remove(kSession));

  spec.layers.insert(spec.layers.end(), 2, spec.layers[0]);
  for (size_t i = 0; i < 5; ++i) spec.layers[i].name = absl::StrCat("layer", i);
  options.capacity_bytes = BytesOf({0, 1});  // of a longer table
  const absl::Status refused = Make(2).Install(MakeInstall()).status();
  EXPECT_EQ(GetErrorReason(refused), ErrorReason::kCapacity) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr(absl::StrCat("test:0 does not fit: needed ", BytesOf({0, 1, 2}), " bytes, reserved 0 of ",
                                           "capacity ", options.capacity_bytes)),
                    HasSubstr(absl::StrCat("test:1 fits: needed ", BytesOf({0, 1})))));
  EXPECT_THAT(Reserved(), ElementsAre(0, 0));
  for (const auto& device : devices_) EXPECT_EQ(device->backend->allocated_bytes(), 0);
}

TEST_F(ShardDevicesTest, RoomComesBeforeBalance) {
  const MethodSet methods = MethodSet::Make(spec, options.make_method).value();
  // By cost the most expensive one would go where there is most room, and the others would lack it.
  const std::vector<uint32_t> all = {0, 1, 2, 3, 4};
  std::vector<AssignmentDevice> devices = {{.free_bytes = BytesOf({0, 1, 2, 3})}, {.free_bytes = BytesOf({4})}};
  const LayersOfDevices found = AssignDevices(spec, methods, all, options.window_steps, devices);
  EXPECT_THAT(found, ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4)));
  // A device with much to do gets nothing that another can take.
  devices = {{.free_bytes = 1 << 30, .load = 1e18}, {.free_bytes = 1 << 30}, {.free_bytes = 1 << 30}};
  EXPECT_THAT(AssignDevices(spec, methods, all, options.window_steps, devices)[0], IsEmpty());
}

TEST_F(ShardDevicesTest, AnswersAreThoseOfOneDevice) {
  for (const char* method : {"mkor", "eva", "kfac", "kron"}) {
    SCOPED_TRACE(method);
    spec.method = {.name = method, .options = {}};
    if (spec.method.name == "kfac") spec.method.options["refresh_lag"] = 2.0;
    std::vector<std::vector<Payload>> expected;
    for (const size_t count : {1, 2, 3}) {
      ASSERT_TRUE(Make(count).Install(MakeInstall()).ok());
      std::vector<std::vector<Payload>> answers;
      for (uint64_t step = 0; step < 12; ++step) answers.push_back(Answers(step));
      if (count == 1) expected = answers;
      EXPECT_EQ(answers, expected) << count << " devices";
      std::set<size_t> used;
      for (size_t i = 0; i < count; ++i) {
        if (devices_[i]->backend->peak_bytes() > 0) used.insert(i);
      }
      EXPECT_EQ(used.size(), count);
    }
  }
}

// The same on threads of each device, with decompositions in the background.
TEST_F(ShardDevicesTest, ThreadsOfSeveralDevicesChangeNoAnswer) {
  spec.method = {.name = "kfac", .options = {{"refresh_lag", 2.0}}};
  std::vector<std::vector<Payload>> expected;
  ASSERT_TRUE(Make(1).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 12; ++step) expected.push_back(Answers(step));
  shard = nullptr;
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::unique_ptr<ThreadPoolExecutor>> threads;
  std::vector<ShardDevice> devices;
  for (int i = 0; i < 3; ++i) {
    backends.push_back(MakeCpuBackend({}).value());
    threads.push_back(std::make_unique<ThreadPoolExecutor>(2));
    devices.push_back({.name = absl::StrCat("test:", i), .backend = *backends[i], .executor = *threads[i]});
  }
  shard = std::make_unique<Shard>(options, std::move(devices), clock, logger, seen);
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 12; ++step) {
    const std::vector<absl::StatusOr<GradientResult>> results = StepOn(threads, step);
    for (size_t layer = 0; layer < results.size(); ++layer) {
      ASSERT_TRUE(results[layer].ok()) << results[layer].status();
      EXPECT_EQ(*results[layer]->bytes, expected[step][layer]) << "step " << step << " layer " << layer;
    }
  }
  shard = nullptr;
  threads.clear();  // before the backends
}

// The journal of a shard with three devices brings its session back on one with two, to the bit.
TEST_F(ShardDevicesTest, ComesBackOnAnotherNumberOfDevices) {
  std::vector<Payload> expected;
  {
    ASSERT_TRUE(Make(1).Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < 8; ++step) Answers(step);
    expected = Answers(8);
  }
  MemoryJournal journal;
  options.journal = &journal;
  options.snapshot_interval_steps = 4;
  ASSERT_TRUE(Make(3).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 8; ++step) Answers(step);
  ASSERT_GT(journal.snapshots(), 0);
  Make(2).replay().Begin();
  journal.Restore(*shard);
  ASSERT_THAT(shard->replay().Finish(), IsEmpty());
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  EXPECT_FALSE(Where()[0].empty());
  EXPECT_FALSE(Where()[1].empty());
  EXPECT_EQ(Answers(8), expected);
}

TEST_F(ShardDevicesTest, ReleasedFactorsGiveBackTheMemoryOfEveryDevice) {
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  const auto where = Where();
  const std::vector<int64_t> held = Reserved();
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 1, .hold = false}).ok());
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(Reserved()[i],
              ComputeFirstOrderReservation(spec, where[i], options.window_steps, /*parallelism=*/1).total());
    EXPECT_EQ(devices_[i]->backend->allocated_bytes(), 0);
  }
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 2, .hold = true}).ok());
  EXPECT_EQ(Reserved(), held);
  EXPECT_EQ(Where(), where);
  Answers(0);
}

// One device does not work any more: its layers answer IDENTITY, the other's go on.
TEST_F(ShardDevicesTest, ADeviceThatFailsTakesItsOwnLayersAlone) {
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  Answers(0);
  const auto where = Where();
  devices_[1]->backend->FailAlways();
  for (const auto& [layer, reply] : Step(1)) {
    const bool of_the_failed = std::find(where[1].begin(), where[1].end(), layer) != where[1].end();
    EXPECT_EQ(reply->decision(), of_the_failed ? Decision::kIdentity : Decision::kPreconditioned) << layer;
    EXPECT_EQ((*reply->result)->factor_version, of_the_failed ? 1u : 2u);
  }
}

TEST_F(ShardDevicesTest, SaysOnceWhichDeviceIsLost) {
  Make(2);
  EXPECT_EQ(shard->upkeep().CountLostDevices(), 0u);
  EXPECT_THAT(seen.usables, ElementsAre(std::pair("test:0", true), std::pair("test:1", true)));
  devices_[1]->backend->FailAlways();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(shard->upkeep().CountLostDevices(), 1u);
  EXPECT_EQ(seen.usables.size(), 3u);
  EXPECT_EQ(seen.usables.back(), std::pair(std::string("test:1"), false));
  const ShardDescription description = shard->Describe().value();
  EXPECT_EQ(description.devices[0].fault, "");
  EXPECT_EQ(description.devices[1].fault, "injected fault");
}

}  // namespace
}  // namespace precondor

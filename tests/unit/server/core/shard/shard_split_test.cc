// SPDX-License-Identifier: Apache-2.0
// Layers that a shard's devices have together: answers, what is reserved where, and what becomes of them when factors
// are released, the shard comes back, layers change or a device fails.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/memory_journal.h"
#include "tests/support/split_method.h"
#include "tests/unit/server/core/shard/shard_devices_fixture.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kWide = 0;
constexpr int64_t kSplitDim = 24;

class ShardSplitTest : public ShardDevicesFixture {
 protected:
  ShardSplitTest() {
    grouped = true;
    options.make_method = [this](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
      return std::make_unique<SplitMethod>(log, kSplitDim);
    };
    spec.method = {.name = "split", .options = {}};
    spec.layers = {{.name = "wide", .d_out = 31, .d_in = 7, .has_bias = false},
                   {.name = "a", .d_out = 6, .d_in = 5, .has_bias = false},
                   {.name = "b", .d_out = 5, .d_in = 4, .has_bias = false}};
  }

  // A gradient as it was sent.
  std::vector<float> Sent(uint64_t step, uint32_t layer, uint32_t rank) const {
    const ContributionHeader header = Header(ContributionKind::kGradient, step, rank, layer);
    const Payload bytes = Distinct(header);
    std::vector<float> values(bytes.size() / sizeof(float));
    DecodeElements(DType::kF32, bytes.data(), 1, absl::MakeSpan(values));
    return values;
  }
  // U = (I + sum g g') D of the updates so far, in f64.
  std::vector<double> Expected(uint64_t step, uint32_t layer) const {
    const LayerSpec& shape = spec.layers[layer];
    std::vector<double> d(static_cast<size_t>(shape.d_out * shape.d_in));
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
      const std::vector<float> sent = Sent(step, layer, rank);
      for (size_t i = 0; i < d.size(); ++i) d[i] += sent[i] / static_cast<double>(spec.world_size);
    }
    std::vector<double> u = d;
    const std::vector<FakeUpdate> updates = log->updates();
    for (const FakeUpdate& update : updates) {
      if (update.layer != shape.name) continue;
      for (int64_t v = 0; v < update.k; ++v) {
        const float* const g = update.g.data() + v * shape.d_out;
        for (int64_t j = 0; j < shape.d_in; ++j) {
          double product = 0;
          for (int64_t i = 0; i < shape.d_out; ++i) product += g[i] * d[i * shape.d_in + j];
          for (int64_t i = 0; i < shape.d_out; ++i) u[i * shape.d_in + j] += g[i] * product;
        }
      }
    }
    return u;
  }
  void ExpectClose(const std::vector<float>& got, const std::vector<double>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    // Sums of some hundred terms of about the largest one, in f32.
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5 * largest) << i;
  }
  void ExpectStep(uint64_t step) {
    for (const auto& [layer, reply] : Step(step)) {
      ASSERT_EQ(reply->decision(), Decision::kPreconditioned) << layer << ": " << (*reply->result)->reason;
      ExpectClose(reply->values(), Expected(step, layer));
    }
  }
  // What the unsplit layers of each device need, and the wide one or its parts; every layer on one thread.
  std::vector<int64_t> BytesBy(const std::vector<std::vector<uint32_t>>& where) const {
    const SplitMethod method(log, kSplitDim);
    const LayerSpec& wide = spec.layers[kWide];
    const int ranks = static_cast<int>(where.size());
    const int64_t vectors = VectorsPerStep(spec, kWide);
    const int64_t block = (wide.d_out + ranks - 1) / ranks;
    const int64_t rows = 4 * block * wide.d_out;
    const int64_t scratch = 4 * (wide.d_out + block + ranks * block) * wide.d_in;
    std::vector<int64_t> bytes;
    for (const std::vector<uint32_t>& layers : where) {
      if (std::find(layers.begin(), layers.end(), kWide) == layers.end()) {
        bytes.push_back(BytesOf(layers) + rows + scratch);
      } else {
        // It is the largest in everything, so that scratch is its own.
        bytes.push_back(BytesOf(layers) - method.StateBytes(wide) - method.ScratchBytes(wide, vectors) + rows +
                        scratch);
      }
    }
    return bytes;
  }
  std::vector<int64_t> Allocated() const {
    std::vector<int64_t> bytes;
    for (const auto& device : devices_) bytes.push_back(device->backend->allocated_bytes());
    return bytes;
  }
};

TEST_F(ShardSplitTest, AnswersAreTheReferencesOnAnyNumberOfDevices) {
  for (const size_t count : {1, 2, 3, 4}) {
    SCOPED_TRACE(count);
    log = std::make_shared<FakeMethodLog>();
    ASSERT_TRUE(Make(count).Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < 4; ++step) ExpectStep(step);
    EXPECT_THAT(Allocated(), Each(::testing::Ge(4 * 7 * 31))) << "every device has its rows";
  }
}

// Without a group layers that would split are on one device as all others.
TEST_F(ShardSplitTest, WithoutAGroupNothingSplits) {
  grouped = false;
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 2; ++step) ExpectStep(step);
  const auto where = Where();
  EXPECT_THAT(Reserved(), ElementsAre(BytesOf(where[0]), BytesOf(where[1])));
}

TEST_F(ShardSplitTest, ReservesExactlyItsPartsOnEachDevice) {
  for (const size_t count : {2, 3, 4}) {
    SCOPED_TRACE(count);
    log = std::make_shared<FakeMethodLog>();
    Make(count);
    const int64_t bytes = shard->Install(MakeInstall()).value();
    EXPECT_EQ(Reserved(), BytesBy(Where()));
    EXPECT_EQ(seen.devices["test:1"], std::make_pair(Reserved()[1], options.capacity_bytes));
    EXPECT_EQ(seen.whole, std::make_pair(bytes, static_cast<int64_t>(count) * options.capacity_bytes));
    for (uint64_t step = 0; step < 4; ++step) ExpectStep(step);
    for (size_t i = 0; i < count; ++i) EXPECT_LE(devices_[i]->backend->peak_bytes(), Reserved()[i]) << i;
    ASSERT_TRUE(*shard->Remove(kSession));
    EXPECT_THAT(Reserved(), Each(0));
    EXPECT_THAT(Allocated(), Each(0));
  }
}

TEST_F(ShardSplitTest, AdmitsWhatNoSingleDeviceHasRoomFor) {
  spec.layers.resize(1);
  // Staging is the owner's alone: with the narrow gradients here most of the bytes are factors.
  spec.layers[kWide].d_out = 200;
  const std::vector<int64_t> needed = BytesBy({{kWide}, {}, {}});
  options.capacity_bytes = needed[0];
  ASSERT_GT(BytesOf({kWide}), options.capacity_bytes);
  ASSERT_TRUE(Make(3).Install(MakeInstall()).ok());
  EXPECT_EQ(Reserved(), needed);
  ExpectStep(0);
  ASSERT_TRUE(*shard->Remove(kSession));

  // Of two each has half, and the owner all staging.
  const absl::Status two = Make(2).Install(MakeInstall()).status();
  EXPECT_EQ(GetErrorReason(two), ErrorReason::kCapacity) << two;
  const std::vector<int64_t> of_two = BytesBy({{kWide}, {}});
  EXPECT_THAT(std::string(two.message()), AllOf(HasSubstr(absl::StrCat("test:0 does not fit: needed ", of_two[0])),
                                                HasSubstr(absl::StrCat("test:1 fits: needed ", of_two[1]))));
  EXPECT_THAT(Reserved(), Each(0));
  EXPECT_THAT(Allocated(), Each(0));
  grouped = false;
  EXPECT_EQ(GetErrorReason(Make(3).Install(MakeInstall()).status()), ErrorReason::kCapacity);
}

// Room for its part decides as well as room for the whole: the fullest device is another one than the layer's.
TEST_F(ShardSplitTest, IsRefusedWhereAnotherDeviceLacksRoomForItsPart) {
  const MethodSet methods = MethodSet::Make(spec, options.make_method).value();
  const std::vector<int> open(spec.layers.size(), -1);
  const std::vector<int64_t> needed = BytesBy({{kWide}, {}});
  const auto assign = [&](int64_t first, int64_t second) {
    const std::vector<AssignmentDevice> devices = {{.free_bytes = first, .load = 5}, {.free_bytes = second}};
    return AssignDevices(spec, methods, {kWide}, open, {}, options.window_steps, devices, /*ranks=*/2);
  };
  EXPECT_THAT(assign(needed[0], needed[1]), ElementsAre(ElementsAre(kWide), IsEmpty())) << "whatever is to do there";
  EXPECT_THAT(assign(needed[1], needed[0]), ElementsAre(IsEmpty(), ElementsAre(kWide)));
  EXPECT_THAT(assign(needed[0] + 2, needed[0] + 1), ElementsAre(ElementsAre(kWide), IsEmpty())) << "most room";
  spec.layers.resize(1);
  const std::vector<int64_t> alone = BytesBy({{kWide}, {}});
  options.capacity_bytes = alone[0] - 1;
  ASSERT_GE(options.capacity_bytes, alone[1]);
  EXPECT_EQ(GetErrorReason(Make(2).Install(MakeInstall()).status()), ErrorReason::kCapacity);
}

// Two sessions whose layers have different owners work at the same devices.
TEST_F(ShardSplitTest, SeveralLayersShareAllDevices) {
  spec.layers = {spec.layers[0], spec.layers[0]};
  spec.layers[1].name.back() = '2';  // of equal length: names are counted
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  EXPECT_THAT(Where(), ElementsAre(ElementsAre(0), ElementsAre(1)));
  EXPECT_EQ(Reserved()[0], Reserved()[1]);
  for (uint64_t step = 0; step < 4; ++step) ExpectStep(step);
  for (size_t i = 0; i < 2; ++i) EXPECT_LE(devices_[i]->backend->peak_bytes(), Reserved()[i]) << i;
}

TEST_F(ShardSplitTest, ThreadsOfAllDevicesMeetInTheGroup) {
  spec.layers.resize(1);
  for (int i = 1; i < 6; ++i) {
    spec.layers.push_back(spec.layers[0]);
    spec.layers.back().name = absl::StrCat("wide", i);
  }
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::unique_ptr<ThreadPoolExecutor>> threads;
  std::vector<ShardDevice> devices;
  std::vector<Backend*> of_group;
  for (size_t i = 0; i < 3; ++i) {
    backends.push_back(MakeCpuBackend({}).value());
    threads.push_back(std::make_unique<ThreadPoolExecutor>(2));
    devices.push_back({.name = absl::StrCat("test:", i), .backend = *backends[i], .executor = *threads[i]});
    of_group.push_back(backends[i].get());
  }
  group_ = MakeGroup(of_group);
  options.group = group_.get();
  shard = std::make_unique<Shard>(options, std::move(devices), clock, logger, seen);
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 6; ++step) {
    std::vector<absl::StatusOr<GradientResult>> results = StepOn(threads, step);
    for (uint32_t layer = 0; layer < results.size(); ++layer) {
      ASSERT_TRUE(results[layer].ok()) << results[layer].status();
      ASSERT_EQ(results[layer]->decision, Decision::kPreconditioned) << results[layer]->reason;
      Reply reply{.ack = true, .result = std::move(results[layer])};
      ExpectClose(reply.values(), Expected(step, layer));
    }
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_LE(backends[i]->allocated_bytes(), Reserved()[i]);
  shard = nullptr;
  threads.clear();  // before the group, and this before the backends
  group_ = nullptr;
}

TEST_F(ShardSplitTest, ReleasedFactorsLeaveEveryDeviceAndComeBackAsTheyWere) {
  std::vector<std::vector<Payload>> expected;
  ASSERT_TRUE(Make(3).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 4; ++step) expected.push_back(Answers(step));
  MemoryJournal journal;
  options.journal = &journal;
  ASSERT_TRUE(Make(3).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 3; ++step) EXPECT_EQ(Answers(step), expected[step]);
  const std::vector<int64_t> held = Reserved();
  const auto where = Where();
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 1, .hold = false}).ok());
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(Reserved()[i],
              ComputeFirstOrderReservation(spec, where[i], options.window_steps, /*parallelism=*/1).total());
  }
  EXPECT_THAT(Allocated(), Each(0));
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 2, .hold = true}).ok());
  EXPECT_EQ(Reserved(), held);
  EXPECT_EQ(Answers(3), expected[3]);
  shard = nullptr;
}

// What is written down does not depend on the number of devices; sums do, in their last bits.
TEST_F(ShardSplitTest, ComesBackOnAnyNumberOfDevices) {
  options.snapshot_interval_steps = 4;
  for (const size_t before : {1, 2, 3}) {
    for (const size_t after : {1, 2, 3}) {
      SCOPED_TRACE(absl::StrCat(before, " to ", after));
      log = std::make_shared<FakeMethodLog>();
      options.journal = nullptr;
      ASSERT_TRUE(Make(before).Install(MakeInstall()).ok());
      for (uint64_t step = 0; step < 7; ++step) ExpectStep(step);
      const std::vector<Payload> expected = Answers(7);
      const std::shared_ptr<FakeMethodLog> made = log;  // all eight updates
      MemoryJournal journal;
      options.journal = &journal;
      log = std::make_shared<FakeMethodLog>();
      ASSERT_TRUE(Make(before).Install(MakeInstall()).ok());
      for (uint64_t step = 0; step < 7; ++step) Answers(step);
      ASSERT_GT(journal.snapshots(), 0);
      Make(after).replay().Begin();
      journal.Restore(*shard);
      ASSERT_THAT(shard->replay().Finish(), IsEmpty());
      ASSERT_TRUE(shard->Install(MakeInstall()).ok());
      log = made;
      if (after > 1) {
        EXPECT_EQ(Reserved(), BytesBy(Where()));
      }
      const auto replies = Step(7);
      for (const auto& [layer, reply] : replies) {
        ASSERT_EQ(reply->decision(), Decision::kPreconditioned) << (*reply->result)->reason;
        EXPECT_EQ((*reply->result)->factor_version, 8u);
        if (before == after) {
          EXPECT_EQ(*(*reply->result)->bytes, expected[layer]);
        } else {
          ExpectClose(reply->values(), Expected(7, layer));
        }
      }
      shard = nullptr;
    }
  }
}

TEST_F(ShardSplitTest, ComesAndGoesWithTheSessionsLayers) {
  ASSERT_TRUE(Make(2).Install(Of({1, 2})).ok());
  const auto before = Where();
  EXPECT_THAT(Reserved(), ElementsAre(BytesOf(before[0]), BytesOf(before[1])));
  ASSERT_TRUE(shard->Install(Of({0, 1, 2}, 2)).ok());
  EXPECT_EQ(Reserved(), BytesBy(Where()));
  epoch = 2;
  ExpectStep(0);
  ASSERT_TRUE(shard->Install(Of({1, 2}, 3)).ok());
  EXPECT_THAT(Reserved(), ElementsAre(BytesOf(before[0]), BytesOf(before[1])));
  ASSERT_TRUE(*shard->Remove(kSession));
  EXPECT_THAT(Allocated(), Each(0));
}

// Whichever device it is that fails, the split layer answers IDENTITY and says why, as do the layers of that device;
// no rank waits, and the others' answers are as before.
TEST_F(ShardSplitTest, ADeviceThatFailsTakesTheSplitLayersWithIt) {
  for (const size_t failing : {0, 1, 2}) {
    SCOPED_TRACE(failing);
    log = std::make_shared<FakeMethodLog>();
    ASSERT_TRUE(Make(3).Install(MakeInstall()).ok());
    ExpectStep(0);
    const auto where = Where();
    devices_[failing]->backend->FailAlways();
    for (uint64_t step = 1; step < 3; ++step) {
      for (const auto& [layer, reply] : Step(step)) {
        const auto& lost = where[failing];
        const bool fails = layer == kWide || std::find(lost.begin(), lost.end(), layer) != lost.end();
        EXPECT_EQ(reply->decision(), fails ? Decision::kIdentity : Decision::kPreconditioned) << layer;
        EXPECT_EQ((*reply->result)->factor_version, fails ? 1u : step + 1) << layer;
        if (fails) {
          EXPECT_THAT((*reply->result)->reason, HasSubstr("injected fault")) << layer;
        } else {
          ExpectClose(reply->values(), Expected(step, layer));
        }
      }
    }
    EXPECT_EQ(shard->in_flight(), 0);
  }
}

// One operation of another device than the layer's fails once, whichever it is: every gradient is answered, with the
// reason where it is IDENTITY, and none is wrong.
TEST_F(ShardSplitTest, OneFaultInAPartIsAnswered) {
  bool failed = true;
  for (int64_t at = 0; failed; ++at) {
    SCOPED_TRACE(at);
    log = std::make_shared<FakeMethodLog>();
    ASSERT_TRUE(Make(2).Install(Of({kWide})).ok());
    const size_t other = Where()[0].empty() ? 0 : 1;
    const auto step = [&](uint64_t step) {
      for (const ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
        for (uint32_t rank = 0; rank < 2; ++rank) {
          const ContributionHeader header = Header(kind, step, rank, kWide);
          const auto reply = Send(header, Distinct(header));
          if (rank == 0 || kind == ContributionKind::kStatistics) continue;
          ASSERT_TRUE(reply->result.has_value());
          if (reply->decision() == Decision::kPreconditioned) {
            ExpectClose(reply->values(), Expected(step, kWide));
          } else {
            EXPECT_EQ(reply->decision(), Decision::kIdentity);
            EXPECT_THAT((*reply->result)->reason, HasSubstr("injected fault"));
          }
        }
      }
    };
    step(0);
    devices_[other]->backend->FailAt(at);
    step(1);
    failed = devices_[other]->backend->failed();
    step(2);
    EXPECT_EQ(shard->in_flight(), 0);
    ASSERT_LT(at, 100);
  }
}

// --- the same with mkor's own factors -----------------------------------------------------------------------------

class ShardSplitMkorTest : public ShardDevicesFixture {
 protected:
  // Three of the five layers have an input side that splits, the first two of different widths on each device.
  ShardSplitMkorTest() {
    grouped = true;
    spec.method.options = {{"rule", "BLEND"}, {"representation", "DENSE"}, {"split_dim", 38.0}};
  }
  std::vector<std::vector<float>> ValuesOf(uint64_t step) {
    std::vector<std::vector<float>> values;
    for (const auto& [layer, reply] : Step(step)) {
      EXPECT_EQ(reply->decision(), Decision::kPreconditioned) << layer << ": " << (*reply->result)->reason;
      values.push_back(reply->values());
    }
    return values;
  }
  std::vector<std::vector<std::vector<float>>> OfOneDevice(uint64_t steps) {
    std::vector<std::vector<std::vector<float>>> expected;
    EXPECT_TRUE(Make(1).Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < steps; ++step) expected.push_back(ValuesOf(step));
    return expected;
  }
  static void ExpectClose(const std::vector<std::vector<float>>& got, const std::vector<std::vector<float>>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t layer = 0; layer < got.size(); ++layer) {
      double largest = 0;
      for (const float value : expected[layer]) largest = std::max(largest, std::abs(static_cast<double>(value)));
      for (size_t i = 0; i < got[layer].size(); ++i) {
        ASSERT_NEAR(got[layer][i], expected[layer][i], 2e-5 * largest) << "layer " << layer << " at " << i;
      }
    }
  }
};

TEST_F(ShardSplitMkorTest, AnswersAreThoseOfOneDeviceToRounding) {
  const auto expected = OfOneDevice(8);
  for (const size_t count : {2, 3}) {
    SCOPED_TRACE(count);
    ASSERT_TRUE(Make(count).Install(MakeInstall()).ok());
    const MethodSet methods = MethodSet::Make(spec, options.make_method).value();
    int64_t parts = 0;  // of states on devices that the layers are not on
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
      if (!methods.of(layer).Splits(spec.layers[layer])) continue;
      parts += methods.of(layer).SplitStateBytes(spec.layers[layer], static_cast<int>(count)).other;
    }
    EXPECT_GT(parts, 0);
    for (uint64_t step = 0; step < 8; ++step) ExpectClose(ValuesOf(step), expected[step]);
    for (size_t i = 0; i < count; ++i) {
      EXPECT_LE(devices_[i]->backend->peak_bytes(), Reserved()[i]) << i;
      EXPECT_GE(devices_[i]->backend->allocated_bytes(), parts / static_cast<int64_t>(count)) << i;
    }
    ASSERT_TRUE(*shard->Remove(kSession));
    EXPECT_THAT(Reserved(), Each(0));
    for (const auto& device : devices_) EXPECT_EQ(device->backend->allocated_bytes(), 0);
  }
}

TEST_F(ShardSplitMkorTest, ReleasedFactorsComeBackAsTheyWere) {
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 4; ++step) ValuesOf(step);
  const auto expected = ValuesOf(4);
  MemoryJournal journal;
  options.journal = &journal;
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 4; ++step) ValuesOf(step);
  const std::vector<int64_t> held = Reserved();
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 1, .hold = false}).ok());
  for (const auto& device : devices_) EXPECT_EQ(device->backend->allocated_bytes(), 0);
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 2, .hold = true}).ok());
  EXPECT_EQ(Reserved(), held);
  EXPECT_EQ(ValuesOf(4), expected) << "to the bit";
  shard = nullptr;
}

TEST_F(ShardSplitMkorTest, ComesBackOnAnyNumberOfDevices) {
  const auto expected = OfOneDevice(8);
  options.snapshot_interval_steps = 3;
  for (const size_t before : {1, 2, 3}) {
    for (const size_t after : {1, 2, 3}) {
      SCOPED_TRACE(absl::StrCat(before, " to ", after));
      MemoryJournal journal;
      options.journal = &journal;
      ASSERT_TRUE(Make(before).Install(MakeInstall()).ok());
      for (uint64_t step = 0; step < 7; ++step) ValuesOf(step);
      ASSERT_GT(journal.snapshots(), 0);
      Make(after).replay().Begin();
      journal.Restore(*shard);
      ASSERT_THAT(shard->replay().Finish(), IsEmpty());
      ASSERT_TRUE(shard->Install(MakeInstall()).ok());
      ExpectClose(ValuesOf(7), expected[7]);
      shard = nullptr;
    }
  }
}

// Answers of layers that a failing device has no part of are as before; the others' are IDENTITY, with its status.
TEST_F(ShardSplitMkorTest, ADeviceThatFailsTakesTheSplitLayersWithIt) {
  const auto expected = OfOneDevice(3);
  ASSERT_TRUE(Make(3).Install(MakeInstall()).ok());
  ExpectClose(ValuesOf(0), expected[0]);
  const auto where = Where();
  devices_[2]->backend->FailAlways();
  for (uint64_t step = 1; step < 3; ++step) {
    for (const auto& [layer, reply] : Step(step)) {
      const bool split = spec.layers[layer].d_in >= 38;
      const bool lost = split || std::find(where[2].begin(), where[2].end(), layer) != where[2].end();
      EXPECT_EQ(reply->decision(), lost ? Decision::kIdentity : Decision::kPreconditioned) << layer;
      if (lost) {
        EXPECT_THAT((*reply->result)->reason, HasSubstr("injected fault"));
      }
    }
  }
  EXPECT_EQ(shard->in_flight(), 0);
}

}  // namespace
}  // namespace precondor

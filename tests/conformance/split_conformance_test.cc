// SPDX-License-Identifier: Apache-2.0
// Layers of mkor whose factors lie over 2 to 4 devices, by the f64 reference and against what one device does.
#include <atomic>
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <tuple>

#include "absl/strings/str_cat.h"

#include "kernels/cpu/staged_collective.h"
#include "kernels/grouping/grouping_backend.h"
#include "kernels/methods/mkor.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using testing::HasSubstr;

// Longer than anything takes that does not hang.
constexpr absl::Duration kAmple = absl::Seconds(100);

MethodConfig Config(const std::string& rule, double split_dim, const std::string& representation = "DENSE") {
  MethodConfig config;
  config.options["rule"] = rule;
  config.options["representation"] = representation;
  config.options["split_dim"] = split_dim;
  config.options["max_factor_dim"] = 100.0;
  return config;
}

// As many backends, each with faults to order, and their group.
struct Devices {
  explicit Devices(int size) {
    std::vector<Backend*> all;
    for (int rank = 0; rank < size; ++rank) {
      backends.push_back(MakeTestBackend(rank));
      faulty.push_back(std::make_unique<FaultyBackend>(*backends.back()));
      all.push_back(faulty.back().get());
    }
    group = DeviceGroup::Make(all, ConnectLocally(kAmple), kAmple).value();
  }

  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::unique_ptr<FaultyBackend>> faulty;
  std::unique_ptr<DeviceGroup> group;
};

LayerDriver Split(const Method& method, const LayerSpec& layer, DeviceGroup& group, int primary) {
  EXPECT_TRUE(method.Splits(layer));
  return LayerDriver(layer, group.backend(primary), method.MakeSplitState(layer, group, primary).value());
}

struct Form {
  std::string name;
  int64_t d_out, d_in;
  double split_dim, max_factor_dim;
  std::string representation;
};

std::ostream& operator<<(std::ostream& out, const Form& form) { return out << form.name; }

// AUTO with rank 6: sides of 16 and more have a low rank, which is exact for the streams' five directions.
const Form kForms[] = {
    {"BothSides", 13, 29, 5, 100, "DENSE"},     {"InputSide", 13, 29, 20, 100, "DENSE"},
    {"OutputSide", 29, 13, 20, 100, "DENSE"},   {"Blocks", 13, 29, 7, 10, "DENSE"},
    {"FewRows", 3, 5, 1, 100, "DENSE"},         {"LowRankInput", 13, 29, 10, 100, "AUTO"},
    {"LowRankOutput", 29, 13, 10, 100, "AUTO"},
};

class SplitLayers : public testing::TestWithParam<std::tuple<std::string, int, Form>> {};

TEST_P(SplitLayers, GiveTheOraclesAnswer) {
  const auto& [rule, size, form] = GetParam();
  const LayerSpec layer{"layer", form.d_out, form.d_in, false};
  for (const bool rescale : {true, false}) {
    MethodConfig config = Config(rule, form.split_dim, form.representation);
    config.options["scaling"] = std::string(rescale ? "NORM_RESCALE" : "KL_CLIP");
    config.options["max_factor_dim"] = form.max_factor_dim;
    config.options["rank"] = 6.0;
    const std::unique_ptr<Method> method = MakeMkor(config).value();
    reference::MkorOptions options;
    options.rule = rule == "BLEND" ? reference::Rule::kBlend : reference::Rule::kReference;
    options.policy = rescale ? reference::Policy::kNormRescale : reference::Policy::kKlClip;
    options.max_factor_dim = static_cast<int64_t>(form.max_factor_dim);
    reference::Mkor oracle(options, layer.d_out, layer.d_in, false);
    Devices devices(size);
    LayerDriver driver = Split(*method, layer, *devices.group, rescale ? 0 : size - 1);
    VectorStream a(Stream::kSubspace, layer.d_in, 1), g(Stream::kSubspace, layer.d_out, 2);
    for (int step = 0; step < 12; ++step) {
      const reference::Vectors va = a.Next(1 + step % 3), vg = g.Next(1 + step % 2);
      const absl::Status updated = driver.Update(va, vg);
      ASSERT_TRUE(updated.ok()) << updated;
      oracle.Update(va, vg);
      if (step % 4 != 3) continue;
      const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
      const absl::StatusOr<reference::Vector> u = driver.Precondition(d);
      ASSERT_TRUE(u.ok()) << u.status();
      EXPECT_LE(RelativeDifference(*u, oracle.Precondition(d)), 2e-5) << "update " << step;
    }
    EXPECT_EQ(driver.state().version(), 12u);
    const Method::SplitBytes most = method->SplitStateBytes(layer, size);
    int64_t all = 0;
    for (int rank = 0; rank < size; ++rank) {
      const bool primary = rank == (rescale ? 0 : size - 1);
      EXPECT_LE(devices.faulty[rank]->allocated_bytes(), primary ? most.primary : most.other);
      all += devices.faulty[rank]->allocated_bytes();
    }
    EXPECT_EQ(driver.state().bytes(), all);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SplitLayers,
                         testing::Combine(testing::Values("REFERENCE", "BLEND"), testing::Values(2, 3, 4),
                                          testing::ValuesIn(kForms)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param), std::get<1>(info.param),
                                               std::get<2>(info.param).name);
                         });

TEST(SplitConformanceTest, BadStatisticsLeaveTheFactorsAlone) {
  const LayerSpec layer{"layer", 6, 9, false};
  const std::unique_ptr<Method> method = MakeMkor(Config("BLEND", 5)).value();
  Devices devices(3);
  LayerDriver driver = Split(*method, layer, *devices.group, 1);
  VectorStream a(Stream::kCorrelated, 9, 1), g(Stream::kCorrelated, 6, 2);
  ASSERT_TRUE(driver.Update(a.Next(2), g.Next(2)).ok());
  const reference::Vector d = a.Gaussian(54), before = driver.Precondition(d).value();
  reference::Vectors bad = g.Next(2);
  for (const double value : {std::nan(""), static_cast<double>(INFINITY)}) {
    bad[1][3] = value;
    const absl::Status refused = driver.Update(a.Next(2), bad);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_EQ(driver.Precondition(d).value(), before);
    EXPECT_EQ(driver.state().version(), 1u);
  }
}

std::string Saved(LayerDriver& driver) { return driver.state().Save().value(); }

TEST(SplitConformanceTest, SavedStatesMoveBetweenOneDeviceAndSeveral) {
  const LayerSpec layer{"layer", 70, 9, false};  // more than a tile
  for (const char* rule : {"REFERENCE", "BLEND"}) {
    const std::unique_ptr<Method> method = MakeMkor(Config(rule, 9)).value();
    Devices two(2), three(3);
    LayerDriver split = Split(*method, layer, *two.group, 1);
    VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
    for (int step = 0; step < 7; ++step) ASSERT_TRUE(split.Update(a.Next(2), g.Next(1)).ok());
    LayerDriver alone(*method, layer, *two.faulty[0]);
    LayerDriver wider = Split(*method, layer, *three.group, 0), again = Split(*method, layer, *two.group, 0);
    const std::string saved = Saved(split);
    EXPECT_LE(static_cast<int64_t>(saved.size()), method->SavedBytes(layer));
    for (LayerDriver* other : {&alone, &wider, &again}) {
      const absl::Status loaded = other->state().Load(saved);
      ASSERT_TRUE(loaded.ok()) << loaded;
      EXPECT_EQ(other->state().version(), 7u);
    }
    EXPECT_EQ(Saved(again), saved);
    for (int step = 0; step < 5; ++step) {
      const reference::Vectors va = a.Next(1), vg = g.Next(1);
      for (LayerDriver* driver : {&split, &alone, &wider, &again}) {
        const absl::Status updated = driver->Update(va, vg);
        ASSERT_TRUE(updated.ok()) << updated;
      }
    }
    EXPECT_EQ(Saved(again), Saved(split)) << "goes on bitwise";
    // Back, with terms that wait beside M.
    LayerDriver back = Split(*method, layer, *three.group, 2);
    const absl::Status loaded = back.state().Load(Saved(alone));
    ASSERT_TRUE(loaded.ok()) << loaded;
    const reference::Vectors va = a.Next(1), vg = g.Next(1);
    const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
    ASSERT_TRUE(split.Update(va, vg).ok());
    const reference::Vector expected = split.Precondition(d).value();
    for (LayerDriver* driver : {&alone, &wider, &back}) {
      ASSERT_TRUE(driver->Update(va, vg).ok());
      EXPECT_LE(RelativeDifference(driver->Precondition(d).value(), expected), 1e-5);
    }
    // What cannot be loaded changes nothing.
    const std::string healthy = Saved(split);
    const std::string unlike =
        MakeMkor(Config(rule, 9, "LOW_RANK")).value()->MakeState(layer, *two.faulty[0]).value()->Save().value();
    EXPECT_TRUE(absl::IsDataLoss(split.state().Load(healthy.substr(0, healthy.size() / 2))));
    const absl::Status refused = split.state().Load(unlike);
    EXPECT_TRUE(absl::IsFailedPrecondition(refused));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("expected \"dense\" or \"tiles\", got \"low_rank\""));
    EXPECT_EQ(Saved(split), healthy);
  }
}

// As one device saves it after REFERENCE's first statistics, which count for nothing.
TEST(SplitConformanceTest, StatesWithoutTermsThatWaitMoveToSeveral) {
  const LayerSpec layer{"layer", 12, 9, false};
  const std::unique_ptr<Method> method = MakeMkor(Config("REFERENCE", 9)).value();
  Devices three(3);
  LayerDriver alone(*method, layer, *three.faulty[0]);
  VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
  ASSERT_TRUE(alone.Update(a.Next(1), g.Next(1)).ok());
  LayerDriver split = Split(*method, layer, *three.group, 2);
  const absl::Status loaded = split.state().Load(Saved(alone));
  ASSERT_TRUE(loaded.ok()) << loaded;
  const reference::Vectors va = a.Next(1), vg = g.Next(1);
  const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
  for (LayerDriver* driver : {&alone, &split}) ASSERT_TRUE(driver->Update(va, vg).ok());
  EXPECT_LE(RelativeDifference(split.Precondition(d).value(), alone.Precondition(d).value()), 1e-5);
}

// At each operation of each device: an update that fails changes nothing, a device that fails while a change is taken
// in ends the factor. No call waits for the time-out.
TEST(SplitConformanceTest, AFailingDeviceGivesAStatusAndLeavesAllOrNothing) {
  const LayerSpec layer{"layer", 5, 7, false};
  const std::unique_ptr<Method> method = MakeMkor(Config("BLEND", 4)).value();
  Devices devices(3);
  VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
  const reference::Vectors va = a.Next(2), vg = g.Next(2);
  const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
  int kept = 0, lost = 0;
  for (int rank = 0; rank < 3; ++rank) {
    FaultyBackend& device = *devices.faulty[rank];
    for (int64_t fault = 0;; ++fault) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, ", fault ", fault));
      LayerDriver driver = Split(*method, layer, *devices.group, 0);
      ASSERT_TRUE(driver.Update(va, vg).ok());
      const reference::Vector before = driver.Precondition(d).value();
      const DeviceMatrix device_a = ToDevice(*devices.faulty[0], va), device_g = ToDevice(*devices.faulty[0], vg);
      device.FailAt(fault);
      const absl::Status updated = driver.state().Update({device_a.view(), device_g.view()});
      const bool failed = device.failed();
      device.NeverFail();
      if (!failed) {
        EXPECT_TRUE(updated.ok());
        break;
      }
      const absl::StatusOr<reference::Vector> after = driver.Precondition(d);
      if (!updated.ok()) {
        ++kept;
        ASSERT_TRUE(after.ok()) << after.status();
        EXPECT_EQ(*after, before);
        EXPECT_EQ(driver.state().version(), 1u);
        continue;
      }
      ++lost;
      EXPECT_EQ(after.status().code(), absl::StatusCode::kInternal) << after.status();
      EXPECT_THAT(std::string(after.status().message()), HasSubstr(absl::StrCat("lost since rank ", rank, " failed")));
      EXPECT_EQ(driver.state().Save().status(), after.status());
      EXPECT_EQ(driver.Update(va, vg), after.status());
    }
    device.FailAt(0);
    EXPECT_EQ(method->MakeSplitState(layer, *devices.group, 0).status(), absl::InternalError("injected fault"));
    device.NeverFail();
  }
  EXPECT_GT(kept, 30);
  EXPECT_GT(lost, 6);
  // The same of an answer, which changes nothing in any case.
  LayerDriver driver = Split(*method, layer, *devices.group, 1);
  ASSERT_TRUE(driver.Update(va, vg).ok());
  const reference::Vector answer = driver.Precondition(d).value();
  for (int rank = 0; rank < 3; ++rank) {
    FaultyBackend& device = *devices.faulty[rank];
    for (int64_t fault = 0;; ++fault) {
      const DeviceMatrix in = ToDevice(*devices.faulty[1], reference::Vectors(5, reference::Vector(7, 1.0)));
      DeviceMatrix out = devices.faulty[1]->Allocate(5, 7).value();
      device.FailAt(fault);
      const absl::Status status = driver.state().Precondition(in.view(), out.view());
      const bool failed = device.failed();
      device.NeverFail();
      ASSERT_EQ(status.ok(), !failed) << "rank " << rank << ", fault " << fault;
      if (!failed) break;
      EXPECT_EQ(driver.Precondition(d).value(), answer);
    }
  }
}

TEST(SplitConformanceTest, ADeviceThatIsGoneEndsEveryCall) {
  const LayerSpec layer{"layer", 5, 7, false};
  const std::unique_ptr<Method> method = MakeMkor(Config("BLEND", 4)).value();
  Devices devices(2);
  LayerDriver driver = Split(*method, layer, *devices.group, 0);
  VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
  ASSERT_TRUE(driver.Update(a.Next(2), g.Next(2)).ok());
  devices.faulty[1]->FailAlways();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(driver.Update(a.Next(2), g.Next(2)), absl::InternalError("injected fault"));
    EXPECT_EQ(driver.Precondition(a.Gaussian(35)).status(), absl::InternalError("injected fault"));
    EXPECT_FALSE(driver.state().Save().ok());
  }
}

// One layer's updates and answers, in tasks of the backend that its statistics are on.
std::vector<std::string> Work(LayerState& state, const LayerSpec& layer, Backend& backend, uint64_t seed) {
  VectorStream a(Stream::kCorrelated, layer.d_in, seed), g(Stream::kCorrelated, layer.d_out, seed + 1);
  std::vector<std::string> saved;
  for (int step = 0; step < 6; ++step) {
    const DeviceMatrix va = ToDevice(backend, a.Next(2)), vg = ToDevice(backend, g.Next(2));
    const DeviceMatrix d = ToDevice(backend, reference::Vectors(layer.d_out, a.Gaussian()));
    DeviceMatrix u = backend.Allocate(layer.d_out, layer.d_in).value();
    {
      Backend::Task task(backend);
      absl::Status status = state.Update({va.view(), vg.view()});
      EXPECT_TRUE(status.ok()) << status;
      // Work that is deferred when the collective begins belongs to its operands.
      DeviceMatrix twice = backend.Allocate(layer.d_out, layer.d_in).value();
      EXPECT_TRUE(backend.Axpby(2.0, d.view(), 0.0, twice.view()).ok());
      status = state.Precondition(twice.view(), u.view());
      EXPECT_TRUE(status.ok()) << status;
      status = task.Finish();
      EXPECT_TRUE(status.ok()) << status;
    }
    saved.push_back(state.Save().value());
    std::string answer;
    for (const reference::Vector& row : ToHost(backend, u.view())) {
      answer.append(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(double));
    }
    saved.push_back(answer);
  }
  return saved;
}

// Layers split with different primaries, and whole ones of the same devices, from a thread each.
TEST(SplitConformanceTest, GroupedTasksGiveTheSameBits) {
  const LayerSpec split_layer{"split", 11, 14, false}, whole_layer{"whole", 6, 4, false};
  const std::unique_ptr<Method> method = MakeMkor(Config("BLEND", 10)).value();
  ASSERT_FALSE(method->Splits(whole_layer));
  std::vector<std::vector<std::string>> results[2];
  for (const bool grouped : {false, true}) {
    std::vector<std::unique_ptr<Backend>> backends;
    std::vector<Backend*> all;
    for (int rank = 0; rank < 3; ++rank) {
      std::unique_ptr<Backend> backend = MakeTestBackend(rank);
      backends.push_back(grouped ? MakeGroupingBackend(std::move(backend), {}) : std::move(backend));
      all.push_back(backends.back().get());
    }
    const std::unique_ptr<DeviceGroup> group = DeviceGroup::Make(all, ConnectLocally(kAmple), kAmple).value();
    std::vector<std::vector<std::string>> of_layers(6);
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) {
      threads.emplace_back([&, i] {
        const int primary = i % 3;
        const std::unique_ptr<LayerState> state = i < 3 ? method->MakeSplitState(split_layer, *group, primary).value()
                                                        : method->MakeState(whole_layer, *all[primary]).value();
        of_layers[i] = Work(*state, i < 3 ? split_layer : whole_layer, *all[primary], 10 * i);
      });
    }
    for (std::thread& thread : threads) thread.join();
    results[grouped ? 1 : 0] = of_layers;
  }
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace precondor

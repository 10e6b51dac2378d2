// SPDX-License-Identifier: Apache-2.0
// Method kfac against the f64 form that solves the damped systems it stands for.
#include "kernels/methods/kfac.h"

#include <cmath>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "kernels/methods/kfac_side.h"
#include "tests/reference/kfac.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Options = std::map<std::string, OptionValue>;

// Without scaling, so that U itself is compared, and without stagger, as the oracle.
std::unique_ptr<Method> Make(Options options = {}) {
  options.emplace("scaling", std::string("NONE"));
  options.emplace("stagger", false);
  return MakeKfac({"kfac", options}).value();
}

reference::Vectors Mean(const reference::Dense& moment) { return {reference::PackedLower(moment)}; }

// f32 keeps 6e-8 of a factor's largest eigenvalue, and the damping divides by what is left of the smallest: the error
// of U is |U| times up to eps (largest + damping) / damping a side. So U is compared with the bound eps lambda /
// damping, lambda the largest divisor, times |U|.
double Bound(const reference::Kfac& oracle, double damping) {
  const double in = reference::SymmetricEigenvalues(oracle.a()).back();
  const double out = reference::SymmetricEigenvalues(oracle.g()).back();
  return 2e-6 + 4 * std::numeric_limits<float>::epsilon() * (in * out + in + out + damping) / damping;
}

struct Case {
  const char* name;
  Options options;
  reference::KfacOptions reference;
};

std::vector<Case> Cases() {
  const auto text = [](const char* value) { return std::string(value); };
  std::vector<Case> cases = {
      {"eigen", {}, {}},
      {"inverse", {{"form", text("INVERSE")}}, {.inverse = true}},
      {"split", {{"pi_split", true}}, {.pi_split = true}},
      {"inverse split", {{"form", text("INVERSE")}, {"pi_split", true}}, {.inverse = true, .pi_split = true}},
      {"prediv", {{"prediv", true}}, {.prediv = true}},
      {"prediv split", {{"prediv", true}, {"pi_split", true}}, {.prediv = true, .pi_split = true}},
      {"batch scaled", {{"row_scale", 32.0}}, {.row_scale = 32}},
      {"accumulated", {{"accumulation_steps", 3.0}}, {.accumulation_steps = 3}},
      {"intervals", {{"factor_update_steps", text("2")}, {"inv_update_steps", text("6")}}, {}},
      {"accumulated intervals",
       {{"accumulation_steps", 3.0}, {"inv_update_steps", text("4")}},
       {.accumulation_steps = 3}},
      {"schedules",
       {{"damping", text("exponential(0.5, 0.9, 0.02)")},
        {"factor_decay", text("linear(0.5, 0.95, 20)")},
        {"factor_update_steps", text("piecewise(1, 20: 2)")},
        {"inv_update_steps", text("piecewise(1, 8: 3, 25: 5)")}},
       {}},
      {"deferred", {{"refresh_lag", 1.0}}, {.refresh_lag = 1}},
      {"deferred within an interval", {{"refresh_lag", 3.0}, {"inv_update_steps", text("6")}}, {.refresh_lag = 3}},
      {"deferred beyond an interval",
       {{"form", text("INVERSE")}, {"refresh_lag", 5.0}, {"inv_update_steps", text("2")}},
       {.inverse = true, .refresh_lag = 5}},
      {"prediv deferred amid accumulations",
       {{"prediv", true}, {"pi_split", true}, {"refresh_lag", 2.0}, {"accumulation_steps", 3.0}},
       {.prediv = true, .pi_split = true, .accumulation_steps = 3, .refresh_lag = 2}},
  };
  cases[8].reference.factor_update_steps = [](uint64_t) { return 2; };
  cases[8].reference.inv_update_steps = [](uint64_t) { return 6; };
  cases[9].reference.inv_update_steps = [](uint64_t) { return 4; };
  cases[12].reference.inv_update_steps = [](uint64_t) { return 6; };
  cases[13].reference.inv_update_steps = [](uint64_t) { return 2; };
  reference::KfacOptions& scheduled = cases[10].reference;
  scheduled.damping = [](uint64_t t) { return std::max(0.02, 0.5 * std::pow(0.9, static_cast<double>(t))); };
  scheduled.factor_decay = [](uint64_t t) { return t >= 20 ? 0.95 : 0.5 + 0.45 * static_cast<double>(t) / 20; };
  scheduled.factor_update_steps = [](uint64_t t) { return t >= 20 ? 2 : 1; };
  scheduled.inv_update_steps = [](uint64_t t) { return t >= 25 ? 5 : t >= 8 ? 3 : 1; };
  for (Case& one : cases) {
    if (one.options.count("damping") > 0) continue;
    one.options["damping"] = text("0.05");
    one.reference.damping = [](uint64_t) { return 0.05; };
  }
  return cases;
}

class KfacOracle : public testing::TestWithParam<std::tuple<LayerSpec, bool>> {};

// Both forms of statistics, at every update.
TEST_P(KfacOracle, Holds40Updates) {
  const auto& [layer, covariances] = GetParam();
  for (const Case& one : Cases()) {
    SCOPED_TRACE(one.name);
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    const std::unique_ptr<Method> method = Make(one.options);
    LayerDriver driver(*method, layer, *backend);
    reference::Kfac oracle(one.reference, layer.d_out, layer.d_in);
    VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kDrifting, layer.d_out, 2, 0.3);
    for (uint64_t step = 0; step < 40; ++step) {
      const reference::Vectors va = a.Next(1 + step % 7), vg = g.Next(4);
      const reference::Dense ma = reference::SecondMoment(va), mg = reference::SecondMoment(vg);
      const absl::Status updated =
          covariances ? driver.UpdateWithCovariances(Mean(ma)[0], Mean(mg)[0]) : driver.Update(va, vg);
      ASSERT_TRUE(updated.ok()) << updated;
      oracle.Update(ma, mg);
      const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
      const absl::StatusOr<reference::Vector> u = driver.Precondition(d);
      ASSERT_TRUE(u.ok()) << u.status();
      ASSERT_LE(RelativeDifference(*u, oracle.Precondition(d)), Bound(oracle, one.reference.damping(step)))
          << "update " << step;
    }
    EXPECT_EQ(driver.state().version(), 40u);
    EXPECT_LE(driver.state().bytes(), method->StateBytes(layer));
    if (one.reference.refresh_lag == 0) {
      EXPECT_EQ(driver.state().bytes(), method->StateBytes(layer));
    }
    EXPECT_EQ(driver.state().summary().failed_decompositions, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, KfacOracle,
                         testing::Combine(testing::Values(LayerSpec{"scalar", 1, 1, false},
                                                          LayerSpec{"odd", 5, 9, true}, LayerSpec{"wide", 2, 23, false},
                                                          LayerSpec{"tall", 17, 3, true}),
                                          testing::Bool()));

// One layer on a backend that fails when it is told to, and its statistics.
struct FaultyLayer {
  explicit FaultyLayer(const Options& options, LayerSpec spec = {"layer", 4, 6, false})
      : method(Make(options)), layer(std::move(spec)) {}
  LayerDriver Healthy() { return LayerDriver(*method, layer, *cpu); }
  // Both have the same statistics.
  void UpdateWith(LayerDriver& other) {
    const reference::Vectors va = a.Next(3), vg = g.Next(3);
    ASSERT_TRUE(driver.Update(va, vg).ok());
    ASSERT_TRUE(other.Update(va, vg).ok());
  }
  void Update(int count = 1) {
    for (int i = 0; i < count; ++i) ASSERT_TRUE(driver.Update(a.Next(3), g.Next(3)).ok());
  }
  void Refuse(bool refuses) {
    backend.RefuseEigen(refuses);
    backend.RefuseInverses(refuses);
  }
  LayerState::Summary summary() { return driver.state().summary(); }
  reference::Vector Answer() { return driver.Precondition(d).value(); }

  const std::unique_ptr<Backend> cpu = MakeTestBackend();
  FaultyBackend backend{*cpu};
  const std::unique_ptr<Method> method;
  const LayerSpec layer;
  LayerDriver driver{*method, layer, backend};
  VectorStream a{Stream::kCorrelated, layer.d_in, 1}, g{Stream::kCorrelated, layer.d_out, 2};
  const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
};

// A side may come as a covariance while the other comes as vectors; the same second moment gives the same answer.
TEST(KfacTest, TheFormsOfStatisticsMix) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make();
  const LayerSpec layer{"layer", 4, 6, false};
  LayerDriver vectors(*method, layer, *backend), mixed(*method, layer, *backend);
  VectorStream a(Stream::kCorrelated, 6, 1), g(Stream::kCorrelated, 4, 2);
  const reference::Vector d = a.Gaussian(24);
  for (int step = 0; step < 5; ++step) {
    const reference::Vectors va = a.Next(3), vg = g.Next(8);
    ASSERT_TRUE(vectors.Update(va, vg).ok());
    const DeviceMatrix da = ToDevice(*backend, va);
    const DeviceMatrix moment = ToDevice(*backend, Mean(reference::SecondMoment(vg)));
    ASSERT_TRUE(mixed.state().Update({.a = da.view(), .g_covariance = moment.view()}).ok());
    EXPECT_LE(RelativeDifference(mixed.Precondition(d).value(), vectors.Precondition(d).value()), 1e-5);
  }
}

TEST(KfacTest, RefusesShapesAndNonFiniteStatistics) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make();
  LayerDriver driver(*method, {"fc1", 2, 3, false}, *backend);
  ASSERT_TRUE(driver.Update({{1, 2, 3}}, {{1, 2}}).ok());
  const std::string before = driver.state().Save().value();
  const auto refusal = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(driver.state().Save().value(), before);
    return std::string(status.message());
  };
  const reference::Vector a = {1, 0, 1, 0, 0, 1}, g = {1, 0, 1};
  EXPECT_THAT(refusal(driver.UpdateWithCovariances({1, 0, 1}, g)),
              HasSubstr("fc1: statistics a: expected vectors of 6"));
  EXPECT_THAT(refusal(driver.UpdateWithCovariances(a, {1, 0})), HasSubstr("fc1: statistics g: expected vectors of 3"));
  for (const double bad : {std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    EXPECT_THAT(refusal(driver.UpdateWithCovariances({1, 0, bad, 0, 0, 1}, g)), HasSubstr("finite"));
    EXPECT_THAT(refusal(driver.Update({{1, bad, 2}}, {{1, 2}})), HasSubstr("finite"));
  }
  const DeviceMatrix va = ToDevice(*backend, {{1, 2, 3}}), vg = ToDevice(*backend, {{1, 2}});
  const DeviceMatrix ca = ToDevice(*backend, {a}), two = ToDevice(*backend, {a, a});
  EXPECT_THAT(refusal(driver.state().Update({.a = va.view(), .g = vg.view(), .a_covariance = ca.view()})),
              HasSubstr("statistics a: expected vectors or a covariance"));
  EXPECT_THAT(refusal(driver.state().Update({.g = vg.view(), .a_covariance = two.view()})),
              HasSubstr("one covariance"));
  EXPECT_THAT(refusal(driver.Update({{3e38, 3e38, 3e38}}, {{1, 2}})), HasSubstr("within f32"));
}

// An indefinite second moment, as a faulty worker may send it. EIGEN puts the negative eigenvalue to 0. So does INVERSE
// after Cholesky's method has refused.
TEST(KfacTest, NegativeEigenvaluesCountAsZero) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const char* form : {"EIGEN", "INVERSE"}) {
    SCOPED_TRACE(form);
    const std::unique_ptr<Method> method =
        Make({{"form", std::string(form)}, {"factor_decay", std::string("0.5")}, {"damping", std::string("0.25")}});
    LayerDriver driver(*method, {"layer", 1, 2, false}, *backend);
    // F_a = .5 I + .5 S has eigenvalues 2.5 along (1, 1) and -1.5 along (1, -1); F_g = 1.
    ASSERT_TRUE(driver.UpdateWithCovariances({0, 4, 0}, {1}).ok());
    const reference::Vector u = driver.Precondition({1, 0}).value();
    const bool eigen = std::string(form) == "EIGEN";
    const double along = eigen ? 1 / (2.5 + 0.25) : 1 / ((2.5 + 0.25) * 1.25),
                 across = eigen ? 1 / 0.25 : 1 / (0.25 * 1.25);
    EXPECT_NEAR(u[0], (along + across) / 2, 1e-5);
    EXPECT_NEAR(u[1], (along - across) / 2, 1e-5);
    EXPECT_EQ(driver.state().summary().failed_decompositions, 0);
  }
}

// No decomposition: the last good one stays in use, statistics go on, every one of them tries again, the third failure
// in a row begins anew from I, and that is said.
TEST(KfacTest, AFailedDecompositionKeepsTheLastGoodOne) {
  for (const auto& [form, prediv] : {std::pair("EIGEN", false), {"EIGEN", true}, {"INVERSE", false}}) {
    SCOPED_TRACE(testing::Message() << form << ", prediv " << prediv);
    FaultyLayer faulty({{"form", std::string(form)}, {"prediv", prediv}, {"inv_update_steps", std::string("4")}});
    faulty.Update(4);
    const reference::Vector good = faulty.Answer();
    faulty.Refuse(true);
    for (int failure = 1; failure <= 2; ++failure) {
      faulty.Update();
      EXPECT_EQ(faulty.Answer(), good);
      EXPECT_TRUE(faulty.driver.state().ready());
      EXPECT_EQ(faulty.summary().failed_decompositions, failure);
      EXPECT_EQ(faulty.summary().resets, 0);
    }
    // A success ends the row; the next is due at update 8.
    faulty.Refuse(false);
    faulty.Update();
    const reference::Vector better = faulty.Answer();
    EXPECT_NE(better, good);
    faulty.Update();
    EXPECT_EQ(faulty.Answer(), better);
    faulty.Refuse(true);
    faulty.Update(2);
    EXPECT_EQ(faulty.Answer(), better);
    faulty.Update();
    EXPECT_EQ(faulty.summary().failed_decompositions, 5);
    EXPECT_EQ(faulty.summary().resets, 1);
    EXPECT_FALSE(faulty.driver.state().ready());
    EXPECT_EQ(faulty.driver.state().version(), 11u);
    EXPECT_EQ(faulty.Answer(), faulty.d);
    EXPECT_EQ(faulty.driver.state().bytes(), faulty.method->StateBytes(faulty.layer));
    // Anew: what follows is what a fresh layer would make of it.
    faulty.Refuse(false);
    LayerDriver fresh = faulty.Healthy();
    faulty.UpdateWith(fresh);
    EXPECT_EQ(faulty.Answer(), fresh.Precondition(faulty.d).value());
  }
}

TEST(KfacTest, ARefusedCholeskyIsRepeatedByEigenvalues) {
  FaultyLayer faulty({{"form", std::string("INVERSE")}, {"damping", std::string("0.1")}}, {"layer", 5, 8, false});
  LayerDriver other = faulty.Healthy();
  faulty.backend.RefuseInverses(true);
  for (int step = 0; step < 10; ++step) {
    faulty.UpdateWith(other);
    EXPECT_LE(RelativeDifference(faulty.Answer(), other.Precondition(faulty.d).value()), 1e-4);
  }
  EXPECT_EQ(faulty.summary().failed_decompositions, 0);
}

// With one interval for all, layers decompose at different updates, the same ones on every run; the first update of all
// is one of them.
TEST(KfacTest, StaggersDecompositionsOverLayers) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  std::set<std::vector<int>> patterns;
  for (int i = 0; i < 24; ++i) {
    const LayerSpec layer{"encoder." + std::to_string(i), 2, 3, false};
    std::vector<int> first;
    for (int run = 0; run < 2; ++run) {
      const std::unique_ptr<Method> method = Make({{"stagger", true}, {"inv_update_steps", std::string("6")}});
      LayerDriver driver(*method, layer, *backend);
      VectorStream a(Stream::kCorrelated, 3, 1), g(Stream::kCorrelated, 2, 2);
      const reference::Vector d = a.Gaussian(6);
      std::vector<int> changed;
      reference::Vector last = d;
      for (int step = 0; step < 24; ++step) {
        ASSERT_TRUE(driver.Update(a.Next(2), g.Next(2)).ok());
        const reference::Vector u = driver.Precondition(d).value();
        if (u != last) changed.push_back(step);
        last = u;
      }
      ASSERT_GE(changed.size(), 4u);
      EXPECT_EQ(changed[0], 0);
      for (size_t k = 2; k < changed.size(); ++k) EXPECT_EQ(changed[k] - changed[k - 1], 6);
      if (run == 0) first = changed;
      EXPECT_EQ(changed, first);
    }
    patterns.insert(first);
  }
  EXPECT_GE(patterns.size(), 4u);  // of six phases
}

// Failures that have been counted survive, and so does the reset that they lead to.
TEST(KfacTest, ASavedStateRemembersItsFailures) {
  FaultyLayer faulty({});
  faulty.Update();
  faulty.Refuse(true);
  faulty.Update(2);
  LayerDriver other(*faulty.method, faulty.layer, faulty.backend);
  ASSERT_TRUE(other.state().Load(faulty.driver.state().Save().value()).ok());
  EXPECT_TRUE(other.state().ready());
  faulty.UpdateWith(other);
  EXPECT_FALSE(other.state().ready());
  EXPECT_EQ(other.state().summary().resets, 1);
}

// The thread and the time at which deferred work runs change no bit of a result.
TEST(KfacTest, DeferredWorkMayRunAnyTimeOrNever) {
  for (const Case& one : Cases()) {
    if (one.reference.refresh_lag == 0) continue;
    SCOPED_TRACE(one.name);
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    const std::unique_ptr<Method> method = Make(one.options);
    const LayerSpec layer{"layer", 12, 31, true};
    LayerDriver never(*method, layer, *backend), at_once(*method, layer, *backend), late(*method, layer, *backend),
        beside(*method, layer, *backend);
    std::function<void()> for_later;
    std::thread thread;
    VectorStream a(Stream::kCorrelated, 31, 1), g(Stream::kHeavyTailed, 12, 2);
    int given = 0;
    for (int step = 0; step < 30; ++step) {
      const reference::Vectors va = a.Next(2), vg = g.Next(3);
      for (LayerDriver* driver : {&never, &at_once, &late, &beside}) ASSERT_TRUE(driver->Update(va, vg).ok());
      if (const std::function<void()> work = at_once.state().TakeDeferredWork()) {
        work();
        ++given;
      }
      EXPECT_EQ(at_once.state().TakeDeferredWork(), nullptr);
      // That of an earlier update, when it has been needed already or not.
      if (for_later) std::exchange(for_later, nullptr)();
      for_later = late.state().TakeDeferredWork();
      if (std::function<void()> work = beside.state().TakeDeferredWork()) {
        if (thread.joinable()) thread.join();
        thread = std::thread(std::move(work));
      }
      const reference::Vector d = a.Gaussian(12 * 31);
      const reference::Vector expected = never.Precondition(d).value();
      const std::string state = never.state().Save().value();
      for (LayerDriver* driver : {&at_once, &late, &beside}) {
        ASSERT_EQ(driver->Precondition(d).value(), expected) << "update " << step;
        ASSERT_EQ(driver->state().Save().value(), state) << "update " << step;
      }
    }
    if (thread.joinable()) thread.join();
    EXPECT_GE(given, 4);
  }
}

TEST(KfacTest, DeferredWorkOutlivesItsState) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make({{"refresh_lag", 1.0}});
  const LayerSpec layer{"layer", 30, 90, false};
  const auto make = [&] {
    auto driver = std::make_unique<LayerDriver>(*method, layer, *backend);
    VectorStream a(Stream::kCorrelated, 90, 1), g(Stream::kCorrelated, 30, 2);
    for (int step = 0; step < 2; ++step) EXPECT_TRUE(driver->Update(a.Next(3), g.Next(3)).ok());
    return driver;
  };
  const std::function<void()> work = make()->state().TakeDeferredWork();
  EXPECT_EQ(backend->allocated_bytes(), 0);  // its layer is gone
  work();
  // At work when the state goes, or before or after that.
  for (int run = 0; run < 20; ++run) {
    std::unique_ptr<LayerDriver> driver = make();
    std::thread thread(driver->state().TakeDeferredWork());
    driver.reset();
    thread.join();
    EXPECT_EQ(backend->allocated_bytes(), 0);
  }
}

// A loaded state has its work to give as well.
TEST(KfacTest, ASavedStateKeepsWhatWasDeferred) {
  FaultyLayer faulty({{"refresh_lag", 3.0}, {"inv_update_steps", std::string("4")}});
  faulty.Update(6);
  const std::string bytes = faulty.driver.state().Save().value();
  LayerDriver other = faulty.Healthy(), fresh = faulty.Healthy();
  ASSERT_TRUE(other.state().Load(bytes).ok());
  const std::function<void()> work = other.state().TakeDeferredWork();
  ASSERT_NE(work, nullptr);
  work();
  EXPECT_EQ(other.state().Save().value(), bytes);
  // And a state that loads another forgets its own deferred work.
  ASSERT_TRUE(other.state().Load(fresh.state().Save().value()).ok());
  EXPECT_EQ(other.state().TakeDeferredWork(), nullptr);
  EXPECT_LT(other.state().bytes(), faulty.method->StateBytes(faulty.layer));
  // One with another lag is another configuration.
  LayerDriver at_once(*Make({{"inv_update_steps", std::string("4")}}), faulty.layer, *faulty.cpu);
  EXPECT_EQ(at_once.state().Load(bytes).code(), absl::StatusCode::kFailedPrecondition);
}

// The failure counts when the result is due, and the repetition is deferred as well.
TEST(KfacTest, AFailedDeferredDecompositionKeepsTheLastGoodOne) {
  FaultyLayer faulty({{"refresh_lag", 2.0}, {"inv_update_steps", std::string("4")}});
  const auto update = [&] {
    faulty.Update();
    if (const std::function<void()> work = faulty.driver.state().TakeDeferredWork()) work();
  };
  for (int step = 0; step < 4; ++step) update();
  const reference::Vector good = faulty.Answer();
  faulty.Refuse(true);
  // Deferred at update 4, 6 and 8; known at 6, 8 and 10.
  for (int step = 4; step < 10; ++step) {
    update();
    EXPECT_EQ(faulty.Answer(), good);
    EXPECT_EQ(faulty.summary().failed_decompositions, (step - 4) / 2) << step;
  }
  update();
  EXPECT_EQ(faulty.summary().failed_decompositions, 3);
  EXPECT_EQ(faulty.summary().resets, 1);
  EXPECT_FALSE(faulty.driver.state().ready());
  EXPECT_EQ(faulty.Answer(), faulty.d);
  // Anew: the first decomposition is not deferred.
  faulty.Refuse(false);
  LayerDriver fresh = faulty.Healthy();
  faulty.UpdateWith(fresh);
  EXPECT_EQ(faulty.Answer(), fresh.Precondition(faulty.d).value());
}

// An accumulation is given up with the factors.
TEST(KfacTest, AResetBeginsAnewAmidAnAccumulation) {
  FaultyLayer faulty({{"refresh_lag", 1.0}, {"accumulation_steps", 2.0}});
  faulty.Update(5);
  faulty.Refuse(true);
  for (int step = 0; step < 20 && faulty.summary().resets == 0; ++step) faulty.Update();
  ASSERT_EQ(faulty.summary().resets, 1);
  faulty.Refuse(false);
  LayerDriver fresh = faulty.Healthy();
  for (int step = 0; step < 2; ++step) faulty.UpdateWith(fresh);
  ASSERT_TRUE(fresh.state().ready());
  EXPECT_EQ(faulty.Answer(), fresh.Precondition(faulty.d).value());
}

// A fault of the device beside the steps costs nothing: the update that needs the result makes it.
TEST(KfacTest, DeferredWorkThatFailedIsRepeated) {
  for (int64_t fault = 0, faults = 1; fault < faults; ++fault) {
    FaultyLayer faulty({{"refresh_lag", 1.0}, {"prediv", true}});
    LayerDriver other = faulty.Healthy();
    for (int step = 0; step < 4; ++step) {
      faulty.UpdateWith(other);
      if (step != 2) continue;
      faulty.backend.FailAt(fault);
      faulty.driver.state().TakeDeferredWork()();
      if (faulty.backend.failed()) ++faults;
      faulty.backend.NeverFail();
    }
    EXPECT_EQ(faulty.driver.state().Save().value(), other.state().Save().value());
    if (fault <= 5) {
      EXPECT_EQ(faults, fault + 2);  // there are as many operations, and more
    }
  }
}

TEST(KfacTest, ReadsItsOptions) {
  const std::unique_ptr<Method> plain = MakeKfac({"kfac", {}}).value();
  EXPECT_TRUE(plain->needs_global_scale());
  EXPECT_EQ(plain->traits().statistics, StatisticsForm::kCovariances);
  EXPECT_THAT(plain->Warnings(16), IsEmpty());
  EXPECT_THAT(plain->Warnings(1), ElementsAre(HasSubstr("SIGNED")));
  const KfacConfig defaults = ParseKfacConfig({"kfac", {}}).value();
  EXPECT_EQ(defaults.damping.At(0), 0.001);
  EXPECT_EQ(defaults.factor_decay.At(0), 0.95);
  EXPECT_EQ(defaults.scaling_clip.At(0), 0.001);
  // An option at its default and one that is left out are the same configuration of a state.
  EXPECT_EQ(
      ParseKfacConfig({"kfac", {{"damping", std::string("0.001")}, {"scaling", std::string("NONE")}}})->state_text,
      defaults.state_text);
  EXPECT_NE(ParseKfacConfig({"kfac", {{"damping", std::string("0.01")}}})->state_text, defaults.state_text);
  EXPECT_EQ(ParseKfacConfig({"kfac", {{"damping", 0.25}}})->damping.At(7), 0.25);
  EXPECT_EQ(ParseKfacConfig({"kfac", {{"damping", 0.00003}}})->state_text,
            ParseKfacConfig({"kfac", {{"damping", std::string("0.00003")}}})->state_text);
  EXPECT_EQ(ParseKfacConfig({"kfac", {{"refresh_lag", 0.0}}})->state_text, defaults.state_text);
  EXPECT_NE(ParseKfacConfig({"kfac", {{"refresh_lag", 1.0}}})->state_text, defaults.state_text);
  EXPECT_THAT(std::string(MakeKfac({"kfac", {{"form", std::string("INVERSE")}, {"prediv", true}}}).status().message()),
              HasSubstr("prediv: expected form EIGEN"));
}

}  // namespace
}  // namespace precondor

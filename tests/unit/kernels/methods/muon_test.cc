// SPDX-License-Identifier: Apache-2.0
// Method muon against its f64 form, and against properties of orthogonalized matrices.
#include "kernels/methods/muon.h"

#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "tests/reference/muon.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using reference::Dense;
using testing::HasSubstr;
using Options = std::map<std::string, OptionValue>;

// An iteration multiplies an error along a small singular value by at most 3.4445, five of them by 485. f32 rounds
// elements of |X| = 1 by 6e-8: 485 * 6e-8, if all of the error lay along small singular values. The largest difference
// seen is 1e-6.
constexpr double kBound = 3e-5;
// Seven iterations: 3.4445^2 times as much.
constexpr double kBoundOfSeven = 12 * kBound;
// The factor's condition is at most 1 + d_in / damping, 116 here, and f32 rounds its elements.
constexpr double kBoundOfFactor = 10 * kBound;

std::unique_ptr<Method> Make(const Options& options = {}) { return MakeMuon({"muon", options}).value(); }

Dense AsDense(int64_t rows, int64_t cols, const reference::Vector& data) {
  Dense x(rows, cols);
  x.data = data;
  return x;
}

// Ascending.
reference::Vector SingularValues(const Dense& x) {
  const Dense t = reference::Transposed(x);
  reference::Vector values =
      reference::SymmetricEigenvalues(x.rows <= x.cols ? reference::Product(x, t) : reference::Product(t, x));
  for (double& value : values) value = std::sqrt(std::max(value, 0.0));
  return values;
}

struct Case {
  std::string name;
  int64_t m, n;
  Options options = {};
  reference::MuonOptions oracle = {};
  double scale = 1.0;
  double bound = kBound;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {1, 12}, {12, 1}, {16, 16}, {8, 23}, {23, 8}}) {
    cases.push_back({"Plain" + std::to_string(m) + "x" + std::to_string(n), m, n});
  }
  const OptionValue original(std::string("ORIGINAL"));
  cases.push_back({"TallOriginal", 23, 8, {{"scale", original}}, {.original_scale = true}});
  cases.push_back({"WideOriginal", 8, 23, {{"scale", original}}, {.original_scale = true}});
  cases.push_back({"WithoutNesterov", 9, 14, {{"nesterov", false}}, {.nesterov = false}});
  cases.push_back({"WithoutMomentum", 9, 14, {{"momentum", 0.0}}, {.beta = 0}});
  cases.push_back({"OneIteration", 9, 14, {{"ns_steps", 1.0}}, {.iterations = 1}});
  cases.push_back({"EvenIterations", 14, 9, {{"ns_steps", 4.0}}, {.iterations = 4}});
  cases.push_back({"SevenIterations", 9, 14, {{"ns_steps", 7.0}}, {.iterations = 7}, 1.0, kBoundOfSeven});
  cases.push_back({"Epsilon", 9, 14, {{"epsilon", 0.5}}, {.epsilon = 0.5}});
  cases.push_back({"Tiny", 9, 14, {{"epsilon", 0.0}}, {.epsilon = 0}, 1e-30});
  cases.push_back({"Huge", 9, 14, {}, {}, 1e16});
  const Options factor = {{"input_factor", true}};
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {1, 12}, {12, 1}, {8, 23}, {23, 8}}) {
    const std::string name = "Factor" + std::to_string(m) + "x" + std::to_string(n);
    cases.push_back({name, m, n, factor, {.input_factor = true}, 1.0, kBoundOfFactor});
  }
  const Options exact = {{"input_factor", true}, {"epsilon", 0.0}};
  cases.push_back({"FactorTiny", 9, 14, exact, {.epsilon = 0, .input_factor = true}, 1e-30, kBoundOfFactor});
  cases.push_back({"FactorHuge", 9, 14, factor, {.input_factor = true}, 1e16, kBoundOfFactor});
  cases.push_back(
      {"FactorAtEachGradient",
       9,
       14,
       {{"input_factor", true},
        {"damping", 1.0},
        {"covariance_decay", 0.8},
        {"refresh_interval", 1.0},
        {"nesterov", false}},
       {.nesterov = false, .input_factor = true, .damping = 1, .covariance_decay = 0.8, .refresh_interval = 1},
       1.0,
       kBoundOfFactor});
  return cases;
}

class MuonOracle : public testing::TestWithParam<Case> {};

TEST_P(MuonOracle, GivesTheReferencesAnswers) {
  const Case& c = GetParam();
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make(c.options);
  LayerDriver driver(*method, {"layer", c.m, c.n}, *backend);
  GradientStream gradients(c.m, c.n, 5, c.scale);
  reference::Muon oracle(c.oracle, c.m, c.n);
  double worst = 0;
  for (int step = 1; step <= 60; ++step) {
    const Dense d = gradients.Next();
    const absl::StatusOr<reference::Vector> u = driver.Precondition(d.data);
    ASSERT_TRUE(u.ok()) << u.status();
    const double difference = RelativeDifference(*u, oracle.Step(d).data);
    ASSERT_LE(difference, c.bound) << "gradient " << step;
    worst = std::max(worst, difference);
  }
  RecordProperty("worst_relative_difference", std::to_string(worst));
  EXPECT_EQ(driver.state().bytes(), method->StateBytes({"layer", c.m, c.n}));
}

INSTANTIATE_TEST_SUITE_P(All, MuonOracle, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

// Five iterations of a x + b x^3 + c x^5 take every x in [0.002, 1] into [0.68, 1.21], as a scan of the interval in f64
// shows; f32 adds less than kBound. [0.6, 1.3] leaves room for neither a missing iteration nor a wrong coefficient.
TEST(MuonTest, SingularValuesAreNearOne) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {1, 9}, {9, 1}, {16, 16}, {8, 40}, {40, 8}}) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    const LayerSpec layer{"layer", m, n};
    LayerDriver driver(*Make(), layer, *backend);
    GradientStream gradients(m, n, 3);
    const Dense d = gradients.Gaussian(m, n);
    ASSERT_GE(SingularValues(d).front(), 0.002 * reference::FrobeniusNorm(d)) << "too ill-conditioned for the bound";
    const Dense u = AsDense(m, n, driver.Precondition(d.data).value());
    for (const double value : SingularValues(u)) {
      EXPECT_GE(value / MuonConfig().ScaleOf(layer), 0.6) << m << " x " << n;
      EXPECT_LE(value / MuonConfig().ScaleOf(layer), 1.3) << m << " x " << n;
    }
    // min(m, n) singular values of that size, over m n elements.
    const double rms = reference::FrobeniusNorm(u) / std::sqrt(static_cast<double>(m * n));
    EXPECT_GE(rms, 0.2 * 0.6);
    EXPECT_LE(rms, 0.2 * 1.3);
  }
}

TEST(MuonTest, ATransposedGradientHasTheTransposedAnswer) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make();
  LayerDriver wide(*method, {"wide", 7, 20}, *backend), tall(*method, {"tall", 20, 7}, *backend);
  GradientStream gradients(7, 20, 2);
  for (int step = 0; step < 10; ++step) {
    const Dense d = gradients.Next();
    const Dense u = AsDense(7, 20, wide.Precondition(d.data).value());
    const reference::Vector other = tall.Precondition(reference::Transposed(d).data).value();
    EXPECT_LE(RelativeDifference(other, reference::Transposed(u).data), kBound);
  }
}

TEST(MuonTest, AZeroGradientGivesZeroUntilThereIsAMomentum) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  LayerDriver driver(*Make({{"epsilon", 0.0}}), {"layer", 5, 8}, *backend);
  const reference::Vector zero(40, 0.0);
  EXPECT_EQ(driver.Precondition(zero).value(), zero);
  EXPECT_EQ(driver.Repeat().value(), zero);
  GradientStream gradients(5, 8, 1);
  EXPECT_GT(Norm(driver.Precondition(gradients.Next().data).value()), 0);
  EXPECT_GT(Norm(driver.Precondition(zero).value()), 0) << "the momentum moves the layer on";
}

// 0.95^1000 is 5e-23. Over epsilon 1e-7 that is 5e-16, which five iterations make at most 485 times as large.
TEST(MuonTest, EpsilonStopsALayerWhoseGradientsHaveEnded) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  LayerDriver driver(*Make(), {"layer", 5, 8}, *backend);
  GradientStream gradients(5, 8, 1);
  ASSERT_TRUE(driver.Precondition(gradients.Next().data).ok());
  const reference::Vector zero(40, 0.0);
  reference::Vector u;
  for (int step = 0; step < 1000; ++step) u = driver.Precondition(zero).value();
  EXPECT_LE(Norm(u), 1e-9);
}

TEST(MuonTest, HoldsTheMomentumAndForNesterovTheAnswer) {
  for (const bool nesterov : {true, false}) {
    EXPECT_EQ(Make({{"nesterov", nesterov}})->StateBytes({"layer", 6, 9}), (nesterov ? 2 : 1) * 54 * 4);
  }
}

TEST(MuonTest, RefusesTheStateOfOtherOptions) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  LayerDriver driver(*Make(), {"layer", 3, 4}, *backend);
  for (const Options& options : std::vector<Options>{{{"momentum", 0.9}},
                                                     {{"nesterov", false}},
                                                     {{"ns_steps", 6.0}},
                                                     {{"scale", std::string("ORIGINAL")}},
                                                     {{"precision", std::string("BF16")}},
                                                     {{"epsilon", 0.0}},
                                                     {{"input_factor", true}}}) {
    LayerDriver other(*Make(options), {"layer", 3, 4}, *backend);
    const absl::Status status = driver.state().Load(other.state().Save().value());
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("configuration"));
  }
}

TEST(MuonTest, AFactorHoldsTheDirectionAndTwoMatricesOfDIn) {
  for (const bool nesterov : {true, false}) {
    const std::unique_ptr<Method> method = Make({{"nesterov", nesterov}, {"input_factor", true}});
    EXPECT_EQ(method->StateBytes({"layer", 6, 9}), (2 * 54 + 2 * 81) * 4);
  }
}

TEST(MuonTest, ALayerWithLongerRowsHasNoFactor) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const LayerSpec layer{"layer", 6, 9};
  LayerDriver plain(*Make(), layer, *backend);
  LayerDriver limited(*Make({{"input_factor", true}, {"max_factor_dim", 8.0}}), layer, *backend);
  GradientStream gradients(6, 9, 1);
  for (int step = 0; step < 12; ++step) {
    const Dense d = gradients.Next();
    EXPECT_EQ(limited.Precondition(d.data).value(), plain.Precondition(d.data).value());
  }
  EXPECT_EQ(limited.state().Save().value(), plain.state().Save().value());
}

TEST(MuonConfigTest, ScalesFollowTheLayer) {
  MuonConfig config;
  EXPECT_DOUBLE_EQ(config.ScaleOf({"w", 100, 25}), 2.0);
  EXPECT_DOUBLE_EQ(config.ScaleOf({"w", 25, 100}), 2.0);
  config.scale = MuonScale::kOriginal;
  EXPECT_DOUBLE_EQ(config.ScaleOf({"w", 100, 25}), 2.0);
  EXPECT_DOUBLE_EQ(config.ScaleOf({"w", 25, 100}), 1.0);
}

TEST(MuonConfigTest, ThePrecisionIsTheBackendsUnlessItIsSet) {
  const std::unique_ptr<Backend> cpu = MakeTestBackend();
  EXPECT_EQ(MuonConfig().PrecisionOn(*cpu), ProductPrecision::kF32);
  for (const auto& [name, precision] : {std::pair("AUTO", ProductPrecision::kF32),
                                        {"F32", ProductPrecision::kF32},
                                        {"TF32", ProductPrecision::kTf32},
                                        {"BF16", ProductPrecision::kBf16}}) {
    const MuonConfig config =
        ParseOptions(MethodConfig{"muon", {{"precision", std::string(name)}}}, ReadMuonConfig).value();
    EXPECT_EQ(config.PrecisionOn(*cpu), precision) << name;
  }
}

TEST(MuonConfigTest, HasThePublishedDefaults) {
  const MuonConfig config = ParseOptions(MethodConfig{"muon", {}}, ReadMuonConfig).value();
  EXPECT_EQ(config.momentum, 0.95);
  EXPECT_TRUE(config.nesterov);
  EXPECT_EQ(config.ns_steps, 5);
  EXPECT_EQ(config.epsilon, 1e-7);
  EXPECT_EQ(config.scale, MuonScale::kMatchRmsAdamw);
  EXPECT_FALSE(config.input_factor);
}

}  // namespace
}  // namespace precondor

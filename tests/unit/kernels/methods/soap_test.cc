// SPDX-License-Identifier: Apache-2.0
// Method soap against its f64 form, step after step, and against Adam where it is Adam.
#include "kernels/methods/soap.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "kernels/methods/state_codec.h"
#include "kernels/methods/tensor.h"
#include "tests/reference/soap.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"
#include "tests/support/soap_bases.h"

namespace precondor {
namespace {

using reference::Dense;
using Options = std::map<std::string, OptionValue>;

struct Case {
  std::string name;
  int64_t m, n;
  Options options;
  reference::SoapOptions oracle;
  double scale = 1.0;
  std::vector<int64_t> shape = {};
};

// With these sides; those of one element have no factor.
reference::SoapOptions Of(const std::vector<int64_t>& dims, reference::SoapOptions options) {
  options.dims = dims;
  for (const int64_t d : dims) options.factor.push_back(d > 1);
  return options;
}

// Tensors of several dimensions, and of one. Which dimensions are merged follows from the penalty in tensor.h.
std::vector<Case> TensorCases(const reference::SoapOptions& plain, const Options& common) {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, reference::SoapOptions oracle,
                       Options options) {
    const int64_t rest = ElementsOf(absl::MakeConstSpan(shape).subspan(1));
    options.insert(common.begin(), common.end());
    // Single rows span a side of 12 after as many gradients; before that rounding would choose and sort some vectors.
    if (oracle.dims.size() == 1) oracle.interval = 20;
    options["refresh_interval"] = static_cast<double>(oracle.interval);
    cases.push_back({name, shape[0], rest, std::move(options), std::move(oracle), 1.0, shape});
  };
  const auto sides = [&](const std::vector<int64_t>& dims) { return Of(dims, plain); };
  const auto without = [&](const std::vector<int64_t>& dims, const std::vector<size_t>& modes) {
    reference::SoapOptions options = Of(dims, plain);
    for (const size_t mode : modes) options.factor[mode] = false;
    return options;
  };
  const OptionValue no(false), yes(true);
  add("Shape5x4x3", {5, 4, 3}, sides({5, 4, 3}), {{"merge_small_dims", no}});
  add("Convolution", {6, 4, 3, 3}, sides({6, 4, 3, 3}), {{"merge_small_dims", no}});
  add("Shape2x3x2x2x3", {2, 3, 2, 2, 3}, sides({2, 3, 2, 2, 3}), {{"merge_small_dims", no}});
  add("ShapeWithOnes", {1, 6, 1, 4}, sides({1, 6, 1, 4}), {{"merge_small_dims", no}});
  add("ShapeOneMergedAway", {6, 1, 4}, sides({6, 4}), {{"target_merged_dim_size", 6.0}});
  add("ShapeMergedToMatrix", {8, 3, 2, 2}, sides({8, 12}), {{"target_merged_dim_size", 10.0}});
  add("ShapeMergedToOther", {3, 2, 2, 8}, sides({12, 8}), {{"target_merged_dim_size", 10.0}});
  add("ShapeMergedToThree", {8, 7, 3, 2}, sides({8, 7, 6}), {{"target_merged_dim_size", 7.0}});
  add("ShapeMergedToOne", {3, 2, 2}, sides({12}), {});
  add("ShapeMergedWithinTheBound", {8, 3, 2}, sides({8, 6}), {{"max_factor_dim", 20.0}});
  add("ShapeLongFirst", {6, 4, 5}, without({6, 4, 5}, {0}), {{"merge_small_dims", no}, {"max_factor_dim", 5.0}});
  add("ShapeLongMiddle", {5, 4, 6, 3}, without({5, 4, 6, 3}, {2}), {{"merge_small_dims", no}, {"max_factor_dim", 5.0}});
  add("ShapeLongLast", {5, 4, 6}, without({5, 4, 6}, {2}), {{"merge_small_dims", no}, {"max_factor_dim", 5.0}});
  add("ShapeOneFactor", {6, 3, 7}, without({6, 3, 7}, {0, 2}), {{"merge_small_dims", no}, {"max_factor_dim", 5.0}});
  add("ShapeVector", {13}, without({13}, {0}), {});
  add("ShapeVectorWithFactor", {12}, sides({12}), {{"precondition_1d", yes}});
  return cases;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 12), {12, 1}, {16, 16}, {8, 23}, {23, 8}}) {
    reference::SoapOptions oracle = Of({m, n}, {});
    oracle.interval = std::min(m, n) > 1 ? 10 : 20;
    cases.push_back({"Plain" + std::to_string(m) + "x" + std::to_string(n),
                     m,
                     n,
                     {{"refresh_interval", static_cast<double>(oracle.interval)}},
                     oracle});
  }
  reference::SoapOptions one_side = Of({9, 14}, {});
  one_side.factor[1] = false;
  cases.push_back({"Small", 9, 14, {{"epsilon", 1e-12}}, Of({9, 14}, {.epsilon = 1e-12}), 1e-4});
  cases.push_back({"Huge", 9, 14, {}, Of({9, 14}, {}), 1e4});
  cases.push_back({"LongSide", 9, 14, {{"max_factor_dim", 10.0}}, one_side});
  cases.push_back(
      {"Options",
       9,
       14,
       {{"momentum", 0.8},
        {"second_moment_decay", 0.99},
        {"covariance_decay", 0.9},
        {"epsilon", 1e-3},
        {"refresh_interval", 5.0}},
       Of({9, 14}, {.beta1 = 0.8, .beta2 = 0.99, .covariance_decay = 0.9, .epsilon = 1e-3, .interval = 5})});
  for (Case& c : TensorCases({}, {})) cases.push_back(std::move(c));
  return cases;
}

class SoapOracle : public testing::TestWithParam<Case> {};

// f32 against f64 over 120 gradients. U's elements in the eigenbasis are of size 1, and an error of a basis turns them:
// a basis of f32 is right to some eps times a covariance's condition of 1e3 over the gaps of its eigenvalues.
TEST_P(SoapOracle, GivesTheReferencesAnswers) {
  const Case& c = GetParam();
  const LayerSpec layer{"layer", c.m, c.n, false, c.shape};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeSoap({"soap", c.options}).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(c.m, c.n, 5, c.scale);
  const Dense first = gradients.Next();
  reference::Soap oracle(c.oracle, FirstBases(*backend, c.oracle, first.data));
  oracle.Step(first.data);
  EXPECT_EQ(driver.Precondition(first.data).value(), reference::Vector(c.m * c.n, 0.0))
      << "none is projected on itself";
  for (int step = 1; step <= 120; ++step) {
    const Dense d = gradients.Next();
    const absl::StatusOr<reference::Vector> u = driver.Precondition(d.data);
    ASSERT_TRUE(u.ok()) << u.status();
    ASSERT_LE(RelativeDifference(*u, oracle.Step(d.data)), 1e-4) << "gradient " << step;
  }
  EXPECT_EQ(driver.state().bytes(), method->StateBytes(layer));
}

INSTANTIATE_TEST_SUITE_P(All, SoapOracle, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

std::vector<Case> ShampooCases() {
  std::vector<Case> cases;
  const reference::SoapOptions plain = {.beta1 = 0.9, .epsilon = 1e-3};
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 12), {12, 1}, {16, 16}, {5, 23}, {23, 5}}) {
    cases.push_back(
        {"Plain" + std::to_string(m) + "x" + std::to_string(n), m, n, {{"epsilon", 1e-3}}, Of({m, n}, plain)});
  }
  reference::SoapOptions one_side = Of({9, 14}, plain), changed = Of({9, 14}, plain);
  one_side.factor[1] = false;
  changed.covariance_decay = 0.8;
  changed.beta1 = 0;
  changed.interval = 3;
  changed.epsilon = 1e-2;
  cases.push_back({"LongSide", 9, 14, {{"epsilon", 1e-3}, {"max_factor_dim", 10.0}}, one_side});
  cases.push_back({"Tiny", 9, 14, {{"epsilon", 1e-3}}, Of({9, 14}, plain), 1e-6});
  cases.push_back({"Options",
                   9,
                   14,
                   {{"momentum", 0.0}, {"covariance_decay", 0.8}, {"refresh_interval", 3.0}, {"epsilon", 1e-2}},
                   changed});
  for (Case& c : TensorCases(plain, {{"epsilon", 1e-3}})) cases.push_back(std::move(c));
  return cases;
}

class ShampooOracle : public testing::TestWithParam<Case> {};

// Roots are computed in f64 of a covariance in f32: its error of some eps, over epsilon 1e-3 of the largest eigenvalue,
// would be 1e-4 were it not for the root. The largest difference seen is 6e-6.
TEST_P(ShampooOracle, GivesTheReferencesAnswers) {
  const Case& c = GetParam();
  const LayerSpec layer{"layer", c.m, c.n, false, c.shape};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  Options options = c.options;
  options["rule"] = std::string("SHAMPOO");
  const std::unique_ptr<Method> method = MakeSoap({"soap", options}).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(c.m, c.n, 5, c.scale);
  reference::Shampoo oracle(c.oracle);
  for (int step = 1; step <= 80; ++step) {
    const Dense d = gradients.Next();
    const absl::StatusOr<reference::Vector> u = driver.Precondition(d.data);
    ASSERT_TRUE(u.ok()) << u.status();
    ASSERT_LE(RelativeDifference(*u, oracle.Step(d.data)), 2e-5) << "gradient " << step;
  }
  EXPECT_EQ(driver.state().bytes(), method->StateBytes(layer));
}

INSTANTIATE_TEST_SUITE_P(All, ShampooOracle, testing::ValuesIn(ShampooCases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

// Without factors it is Adam from the second gradient on.
TEST(SoapTest, IsAdamWithoutFactors) {
  const LayerSpec layer{"layer", 3, 4, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeSoap({"soap", {{"max_factor_dim", 0.0}, {"momentum", 0.9}}}).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(3, 4, 1);
  EXPECT_TRUE(driver.Precondition(gradients.Next().data).ok());
  reference::Vector m(12, 0.0), v(12, 0.0);
  for (int n = 1; n < 30; ++n) {
    const Dense d = gradients.Next();
    reference::Vector expected(12);
    for (int i = 0; i < 12; ++i) {
      m[i] = 0.9 * m[i] + 0.1 * d.data[i];
      v[i] = 0.95 * v[i] + 0.05 * d.data[i] * d.data[i];
      expected[i] = m[i] / (1 - std::pow(0.9, n)) * std::sqrt(1 - std::pow(0.95, n)) / (std::sqrt(v[i]) + 1e-8);
    }
    // A few roundings of f32.
    EXPECT_LE(RelativeDifference(driver.Precondition(d.data).value(), expected), 2e-6);
  }
}

// The basis of a rank-1 gradient has its two vectors; along them Adam sees one number, and U is its sign.
TEST(SoapTest, TurnsIntoTheEigenbasis) {
  const LayerSpec layer{"layer", 4, 6, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeSoap({"soap", {{"momentum", 0.0}, {"second_moment_decay", 0.0}}}).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(4, 6, 1);
  const Dense x = gradients.Gaussian(4, 1), y = gradients.Gaussian(1, 6);
  const double norm = reference::FrobeniusNorm(x) * reference::FrobeniusNorm(y);
  for (const double size : {1.0, -3.0, 0.5, 20.0}) {
    Dense d = reference::Combination(size, reference::Product(x, y), 0, Dense(4, 6));
    for (double& element : d.data) element = static_cast<float>(element);
    const reference::Vector u = driver.Precondition(d.data).value();
    if (size == 1.0) continue;
    double along = 0;
    for (size_t i = 0; i < u.size(); ++i) along += u[i] * d.data[i] / (std::fabs(size) * norm);
    EXPECT_NEAR(along, 1.0, 1e-4);
  }
}

class SoapRules : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Method> Make(Options options = {}) const {
    options["rule"] = GetParam();
    return MakeSoap({"soap", options}).value();
  }
};

// The form on disks: of a matrix no sides are named, and rows come before columns.
TEST_P(SoapRules, TheStateOfAMatrixIsAsItHasBeen) {
  const bool soap = GetParam() == "SOAP";
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  LayerDriver driver(*Make(), {"layer", 2, 3}, *backend);
  StateWriter out("soap");
  out.Text(soap ? "rule 0 momentum 0.94999999999999996 second_moment_decay 0.94999999999999996 covariance_decay "
                  "0.94999999999999996 epsilon 1e-08 refresh_interval 10 max_factor_dim 8192"
                : "rule 1 momentum 0.90000000000000002 second_moment_decay 0.94999999999999996 covariance_decay "
                  "0.94999999999999996 epsilon 9.9999999999999995e-07 refresh_interval 10 max_factor_dim 8192");
  out.Integer(5);
  const auto matrix = [&](int64_t rows, int64_t cols, double element) {
    const DeviceMatrix x = ToDevice(*backend, reference::Vectors(rows, reference::Vector(cols, element)));
    EXPECT_TRUE(out.Matrix(*backend, x.view()).ok());
  };
  for (const int64_t d : {2, 3}) {
    matrix(d, d, 2.0);  // covariance
    matrix(d, d, 0.5);  // factor
  }
  matrix(2, 3, 7.0);                        // momentum
  matrix(soap ? 2 : 0, soap ? 3 : 0, 4.0);  // second moment
  const std::string bytes = out.Finish();
  const absl::Status status = driver.state().Load(bytes);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(driver.state().version(), 5u);
  EXPECT_EQ(driver.state().Save().value(), bytes);
}

INSTANTIATE_TEST_SUITE_P(All, SoapRules, testing::Values("SOAP", "SHAMPOO"));

SoapConfig Parsed(std::map<std::string, OptionValue> options) {
  return ParseOptions(MethodConfig{"soap", std::move(options)}, ReadSoapConfig).value();
}

TEST(SoapConfigTest, ThePrecisionIsTheBackendsUnlessItIsSet) {
  const std::unique_ptr<Backend> cpu = MakeTestBackend();
  for (const auto& [name, precision] : {std::pair("AUTO", ProductPrecision::kF32),
                                        {"F32", ProductPrecision::kF32},
                                        {"TF32", ProductPrecision::kTf32}}) {
    const SoapConfig config = Parsed({{"precision", std::string(name)}});
    EXPECT_EQ(config.PrecisionOn(*cpu), precision) << name;
  }
}

TEST(SoapConfigTest, DefaultsFollowTheRule) {
  const SoapConfig soap = Parsed({});
  EXPECT_EQ(soap.momentum, 0.95);
  EXPECT_EQ(soap.epsilon, 1e-8);
  const SoapConfig shampoo = Parsed({{"rule", std::string("SHAMPOO")}});
  EXPECT_EQ(shampoo.momentum, 0.9);
  EXPECT_EQ(shampoo.epsilon, 1e-6);
  EXPECT_FALSE(soap.precondition_1d);
  EXPECT_TRUE(soap.merging.merge_small_dims);
  EXPECT_EQ(soap.merging.target_merged_dim_size, 256);
}

TEST(SoapConfigTest, SidesFollowTheShape) {
  const auto sides = [](Options options, std::vector<int64_t> shape) {
    const int64_t rest = ElementsOf(absl::MakeConstSpan(shape).subspan(1));
    return Parsed(std::move(options)).Sides({"w", shape[0], rest, false, shape}).Text();
  };
  const SoapConfig plain = Parsed({});
  EXPECT_EQ(plain.Sides({"w", 8192, 2}).Text(), "8192, 2");
  EXPECT_EQ(plain.Sides({"w", 8193, 1}).Text(), "8193 without factor, 1 without factor");
  EXPECT_EQ(plain.Sides({"w", 1, 7}).Text(), "1 without factor, 7") << "no shape: a matrix";
  EXPECT_EQ(plain.Sides({"w", 8193, 3}).FactorElements(), 9);
  EXPECT_EQ(sides({}, {256, 128, 3, 3}), "256, 1152");
  EXPECT_EQ(sides({}, {512, 512, 3, 3}), "512, 512, 9");
  EXPECT_EQ(sides({{"merge_small_dims", false}}, {64, 3, 1, 7}), "64, 3, 1 without factor, 7");
  EXPECT_EQ(sides({{"target_merged_dim_size", 4096.0}}, {64, 64, 3, 3}), "64, 576") << "36864 exceeds max_factor_dim";
  EXPECT_EQ(sides({{"max_factor_dim", 100.0}}, {2, 3, 40, 50}), "6, 40, 50");
  EXPECT_EQ(sides({}, {64, 64}), "64, 64") << "matrices are not merged";
  EXPECT_EQ(sides({}, {5, 4, 3}), "60") << "three dimensions before they were merged";
  EXPECT_EQ(sides({}, {60}), "60 without factor");
  EXPECT_EQ(sides({{"precondition_1d", true}}, {60}), "60");
}

}  // namespace
}  // namespace precondor

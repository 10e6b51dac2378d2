// SPDX-License-Identifier: Apache-2.0
// Method soap against its f64 form, step after step, and against Adam where it is Adam.
#include "kernels/methods/soap.h"

#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "kernels/methods/soap_config.h"
#include "tests/reference/soap.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using reference::Dense;
using testing::HasSubstr;
using Options = std::map<std::string, OptionValue>;

// The eigenvectors of (1 - decay) g g' (or g' g) as the backend finds them, falling, as columns: where g is
// rank-deficient rounding chooses some of them, and the oracle has to go on from the same.
Dense FirstBasis(Backend& backend, const Dense& g, From from, double decay) {
  const bool left = from == From::kLeft;
  const int64_t n = left ? g.rows : g.cols;
  const std::vector<float> values(g.data.begin(), g.data.end());
  DeviceMatrix device = backend.Allocate(g.rows, g.cols).value(), covariance = backend.Allocate(n, n).value(),
               vectors = backend.Allocate(n, n).value();
  EXPECT_TRUE(backend.Upload(ConstMatrixView(values.data(), g.rows, g.cols), device.view()).ok());
  EXPECT_TRUE(
      backend.Gemm(1 - decay, device.view(), Transpose(!left), device.view(), Transpose(left), decay, covariance.view())
          .ok());
  std::vector<double> eigenvalues(n);
  EXPECT_TRUE(backend.SymmetricEigen(covariance.view(), absl::MakeSpan(eigenvalues), vectors.view()).ok());
  const reference::Vectors rows = ToHost(backend, vectors.view());
  Dense out(n, n);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < n; ++i) out.at(i, j) = rows[n - 1 - j][i];
  }
  return out;
}

struct Case {
  std::string name;
  int64_t m, n;
  Options options;
  reference::SoapOptions oracle;
  double scale = 1.0;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 12), {12, 1}, {16, 16}, {8, 23}, {23, 8}}) {
    reference::SoapOptions oracle;
    oracle.left = m > 1;
    oracle.right = n > 1;
    // Single rows span a side of 12 after as many gradients; before that rounding would choose and sort some vectors.
    oracle.interval = std::min(m, n) > 1 ? 10 : 20;
    cases.push_back({"Plain" + std::to_string(m) + "x" + std::to_string(n),
                     m,
                     n,
                     {{"refresh_interval", static_cast<double>(oracle.interval)}},
                     oracle});
  }
  cases.push_back({"Small", 9, 14, {{"epsilon", 1e-12}}, {.epsilon = 1e-12}, 1e-4});
  cases.push_back({"Huge", 9, 14, {}, {}, 1e4});
  cases.push_back({"LongSide", 9, 14, {{"max_factor_dim", 10.0}}, {.right = false}});
  cases.push_back({"Options",
                   9,
                   14,
                   {{"momentum", 0.8},
                    {"second_moment_decay", 0.99},
                    {"covariance_decay", 0.9},
                    {"epsilon", 1e-3},
                    {"refresh_interval", 5.0}},
                   {.beta1 = 0.8, .beta2 = 0.99, .covariance_decay = 0.9, .epsilon = 1e-3, .interval = 5}});
  return cases;
}

class SoapOracle : public testing::TestWithParam<Case> {};

// f32 against f64 over 120 gradients. U's elements in the eigenbasis are of size 1, and an error of a basis turns them:
// a basis of f32 is right to some eps times a covariance's condition of 1e3 over the gaps of its eigenvalues.
TEST_P(SoapOracle, GivesTheReferencesAnswers) {
  const Case& c = GetParam();
  const LayerSpec layer{"layer", c.m, c.n, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeSoap({"soap", c.options}).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(c.m, c.n, 5, c.scale);
  const Dense first = gradients.Next();
  reference::Soap oracle(c.oracle, FirstBasis(*backend, first, From::kLeft, c.oracle.covariance_decay),
                         FirstBasis(*backend, first, From::kRight, c.oracle.covariance_decay));
  oracle.Step(first);
  EXPECT_EQ(driver.Precondition(first.data).value(), reference::Vector(c.m * c.n, 0.0))
      << "none is projected on itself";
  for (int step = 1; step <= 120; ++step) {
    const Dense d = gradients.Next();
    const absl::StatusOr<reference::Vector> u = driver.Precondition(d.data);
    ASSERT_TRUE(u.ok()) << u.status();
    ASSERT_LE(RelativeDifference(*u, oracle.Step(d).data), 1e-4) << "gradient " << step;
  }
  EXPECT_EQ(driver.state().bytes(), method->StateBytes(layer));
}

INSTANTIATE_TEST_SUITE_P(All, SoapOracle, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

std::vector<Case> ShampooCases() {
  std::vector<Case> cases;
  const reference::SoapOptions plain = {.beta1 = 0.9, .epsilon = 1e-3};
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 12), {12, 1}, {16, 16}, {5, 23}, {23, 5}}) {
    reference::SoapOptions oracle = plain;
    oracle.left = m > 1;
    oracle.right = n > 1;
    cases.push_back({"Plain" + std::to_string(m) + "x" + std::to_string(n), m, n, {{"epsilon", 1e-3}}, oracle});
  }
  reference::SoapOptions one_side = plain, changed = plain;
  one_side.right = false;
  changed.covariance_decay = 0.8;
  changed.beta1 = 0;
  changed.interval = 3;
  changed.epsilon = 1e-2;
  cases.push_back({"LongSide", 9, 14, {{"epsilon", 1e-3}, {"max_factor_dim", 10.0}}, one_side});
  cases.push_back({"Tiny", 9, 14, {{"epsilon", 1e-3}}, plain, 1e-6});
  cases.push_back({"Options",
                   9,
                   14,
                   {{"momentum", 0.0}, {"covariance_decay", 0.8}, {"refresh_interval", 3.0}, {"epsilon", 1e-2}},
                   changed});
  return cases;
}

class ShampooOracle : public testing::TestWithParam<Case> {};

// Roots are computed in f64 of a covariance in f32: its error of some eps, over epsilon 1e-3 of the largest eigenvalue,
// would be 1e-4 were it not for the root. The largest difference seen is 6e-6.
TEST_P(ShampooOracle, GivesTheReferencesAnswers) {
  const Case& c = GetParam();
  const LayerSpec layer{"layer", c.m, c.n, false};
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
    ASSERT_LE(RelativeDifference(*u, oracle.Step(d).data), 2e-5) << "gradient " << step;
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

TEST(SoapConfigTest, DefaultsFollowTheRule) {
  const SoapConfig soap = ParseSoapConfig({"soap", {}}).value();
  EXPECT_EQ(soap.momentum, 0.95);
  EXPECT_EQ(soap.epsilon, 1e-8);
  const SoapConfig shampoo = ParseSoapConfig({"soap", {{"rule", std::string("SHAMPOO")}}}).value();
  EXPECT_EQ(shampoo.momentum, 0.9);
  EXPECT_EQ(shampoo.epsilon, 1e-6);
  EXPECT_TRUE(soap.HasFactor(8192) && soap.HasFactor(2));
  EXPECT_FALSE(soap.HasFactor(8193) || soap.HasFactor(1));
}

TEST(SoapConfigTest, RefusesOptionsByName) {
  const std::vector<std::pair<std::string, OptionValue>> cases = {
      {"rule", std::string("ADAM")}, {"momentum", 1.0}, {"second_moment_decay", -0.1},
      {"covariance_decay", 1.0},     {"epsilon", 0.0},  {"refresh_interval", 0.0},
      {"max_factor_dim", 0.5},       {"lr", 0.5}};
  for (const auto& [name, value] : cases) {
    const absl::Status status = ParseSoapConfig({"soap", {{name, value}}}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr("option " + name)) << status;
  }
}

}  // namespace
}  // namespace precondor

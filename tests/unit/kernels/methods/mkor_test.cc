// SPDX-License-Identifier: Apache-2.0
// Whole layers of method mkor: both sides, rescale, blocks, errors.
#include "kernels/methods/mkor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tuple>

#include "kernels/cpu/cpu_backend.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using testing::HasSubstr;

MethodConfig Config(const std::string& rule, const std::string& representation) {
  MethodConfig config;
  config.options["rule"] = rule;
  config.options["representation"] = representation;
  return config;
}

// The authors' package, 300 updates: first vectors thrown away, elements clamped to +-100, H = .95 J + .05 I, rescale
// by the sum of weight and bias norms. Rounding as in factor_test, relative to |U| = |D|.
class PackageParity : public testing::TestWithParam<std::tuple<std::string, bool, double>> {};

TEST_P(PackageParity, Holds300Updates) {
  const auto [representation, has_bias, scale] = GetParam();
  const LayerSpec layer{"layer", 19, 30, has_bias};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeMkor(Config("REFERENCE", representation)).value();
  LayerDriver driver(*method, layer, *backend);
  reference::MkorOptions options;
  options.rule = reference::Rule::kReference;
  reference::Mkor oracle(options, layer.d_out, layer.d_in, has_bias);
  VectorStream a(Stream::kCorrelated, layer.d_in, 1, scale), g(Stream::kHeavyTailed, layer.d_out, 2, scale);
  bool clamped = false;
  for (int step = 1; step <= 300; ++step) {
    reference::Vectors va = a.Next(1);
    const reference::Vectors vg = g.Next(1);
    if (has_bias) va[0].back() = 1.0;
    for (double element : vg[0]) clamped = clamped || std::abs(element) > 100;
    ASSERT_TRUE(driver.Update(va, vg).ok());
    oracle.Update(va, vg);
    const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
    const absl::StatusOr<reference::Vector> u = driver.Precondition(d);
    ASSERT_TRUE(u.ok()) << u.status();
    if (step == 1) {  // J = I still
      EXPECT_LE(RelativeDifference(*u, d), 1e-6);
    }
    ASSERT_LE(RelativeDifference(*u, oracle.Precondition(d)), 2e-5) << "update " << step;
  }
  EXPECT_EQ(clamped, scale > 10);
}

INSTANTIATE_TEST_SUITE_P(All, PackageParity,
                         testing::Combine(testing::Values("DENSE", "LOW_RANK"), testing::Bool(),
                                          testing::Values(0.01, 1.0, 50.0)));

// Both sides in any pair of representations, split into blocks or not.
class LayerForms : public testing::TestWithParam<std::tuple<std::string, int64_t>> {};

TEST_P(LayerForms, GiveTheOraclesAnswer) {
  const auto [representation, max_factor_dim] = GetParam();
  const LayerSpec layer{"layer", 12, 50, true};
  MethodConfig config = Config("EXACT_DAMPED", representation);
  config.options["max_factor_dim"] = static_cast<double>(max_factor_dim);
  // AUTO: the side of 50 has a low rank, that of 12 and every block of at most 17 are dense.
  config.options["rank"] = representation == "LOW_RANK" ? 60.0 : 7.0;
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeMkor(config).value();
  LayerDriver driver(*method, layer, *backend);
  reference::MkorOptions options;
  options.max_factor_dim = max_factor_dim;
  reference::Mkor oracle(options, layer.d_out, layer.d_in, true);
  VectorStream a(Stream::kSubspace, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
  for (int step = 0; step < 60; ++step) {
    const reference::Vectors va = a.Next(4), vg = g.Next(4);
    ASSERT_TRUE(driver.Update(va, vg).ok());
    oracle.Update(va, vg);
  }
  const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in);
  const absl::StatusOr<reference::Vector> u = driver.Precondition(d);
  ASSERT_TRUE(u.ok());
  EXPECT_LE(RelativeDifference(*u, oracle.Precondition(d)), 2e-5);
}

INSTANTIATE_TEST_SUITE_P(All, LayerForms,
                         testing::Combine(testing::Values("DENSE", "LOW_RANK", "AUTO"), testing::Values(8192, 17, 5)));

TEST(MkorTest, ReportsItsForms) {
  MethodConfig config;
  config.options["rank"] = 8.0;
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeMkor(config).value();
  LayerDriver driver(*method, {"layer", 10, 40, false}, *backend);
  VectorStream a(Stream::kCorrelated, 40, 1), g(Stream::kCorrelated, 10, 2);
  ASSERT_TRUE(driver.Update(a.Next(3), g.Next(3)).ok());
  const LayerState::Summary summary = driver.state().summary();
  EXPECT_STREQ(summary.input_representation, "low_rank");
  EXPECT_STREQ(summary.output_representation, "dense");
  EXPECT_EQ(summary.input_rank, 3);
  EXPECT_EQ(summary.output_rank, 0);
  EXPECT_GT(summary.input_damping, 0);
  EXPECT_GT(summary.output_damping, 0);
  EXPECT_EQ(driver.state().version(), 1u);
}

TEST(MkorTest, ABackendWithoutProductsOfBf16RefusesToBegin) {
  MethodConfig config = Config("EXACT_DAMPED", "DENSE");
  config.options["products"] = std::string("BF16");
  const std::unique_ptr<Backend> cpu = MakeTestBackend();
  const absl::Status refused = MakeMkor(config).value()->MakeState({"layer", 80, 70, false}, *cpu).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("option products: expected F32"));
}

TEST(MkorTest, ProductsInTf32NeedNothingOfAMachine) {
  const LayerSpec layer{"layer", 40, 70, false};
  for (const auto& [representation, products] : {std::pair("LOW_RANK", "TF32"), {"DENSE", "TF32"}}) {
    MethodConfig config = Config("EXACT_DAMPED", representation);
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    FaultyBackend defaults(*backend);
    LayerDriver exact(*MakeMkor(config).value(), layer, *backend);
    config.options["products"] = std::string(products);
    LayerDriver rounded(*MakeMkor(config).value(), layer, *backend);
    LayerDriver by_defaults(*MakeMkor(config).value(), layer, defaults);
    VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
    for (int step = 0; step < 5; ++step) {
      const reference::Vectors va = a.Next(2), vg = g.Next(2);
      ASSERT_TRUE(exact.Update(va, vg).ok());
      ASSERT_TRUE(rounded.Update(va, vg).ok());
      ASSERT_TRUE(by_defaults.Update(va, vg).ok());
    }
    const reference::Vector d = a.Gaussian(layer.d_out * layer.d_in), expected = exact.Precondition(d).value();
    EXPECT_LE(RelativeDifference(*rounded.Precondition(d), expected), 1e-4) << representation << " " << products;
    EXPECT_LE(RelativeDifference(*by_defaults.Precondition(d), expected), 1e-4) << representation << " " << products;
  }
}

// Admission counts on this, with the backend's own kernels and not a backend that counts: not a byte more is needed.
TEST(MkorTest, StateAndScratchAreAllThatALayerTakes) {
  struct Case {
    std::string rule;
    int64_t m, n, rank, k;  // rank 0: dense
  };
  const Case cases[] = {{"EXACT_DAMPED", 48, 96, 16, 4},  {"EXACT_DAMPED", 96, 48, 24, 4},
                        {"EXACT_DAMPED", 40, 40, 40, 4},  {"EXACT_DAMPED", 65, 33, 0, 4},
                        {"EXACT_DAMPED", 200, 300, 0, 4}, {"BLEND", 65, 33, 0, 4},
                        {"BLEND", 4, 8, 0, 1024}};
  for (const auto& [rule, m, n, rank, k] : cases) {
    SCOPED_TRACE(testing::Message() << rule << ", [" << m << ", " << n << "], " << k << " vectors");
    MethodConfig config = Config(rule, rank > 0 ? "LOW_RANK" : "DENSE");
    if (rank > 0) config.options["rank"] = static_cast<double>(rank);
    const std::unique_ptr<Method> method = MakeMkor(config).value();
    const LayerSpec layer{"layer", m, n, false};
    const int64_t own = (2 * m * n + k * (m + n)) * static_cast<int64_t>(sizeof(float));
    CpuBackendOptions options;
    options.memory_limit_bytes = method->StateBytes(layer) + method->ScratchBytes(layer, k) + own;
    const std::unique_ptr<Backend> backend = MakeCpuBackend(options).value();
    const std::unique_ptr<LayerState> state = method->MakeState(layer, *backend).value();
    VectorStream a(Stream::kCorrelated, n, 1), g(Stream::kCorrelated, m, 2);
    const DeviceMatrix d = ToDevice(*backend, reference::Vectors(m, a.Gaussian()));
    DeviceMatrix u = backend->Allocate(m, n).value();
    for (int step = 0; step < (k > 4 ? 2 : 30); ++step) {
      const DeviceMatrix va = ToDevice(*backend, a.Next(k)), vg = ToDevice(*backend, g.Next(k));
      const absl::Status updated = state->Update({va.view(), vg.view()});
      ASSERT_TRUE(updated.ok()) << updated;
      const absl::Status preconditioned = state->Precondition(d.view(), u.view());
      ASSERT_TRUE(preconditioned.ok()) << preconditioned;
    }
  }
}

}  // namespace
}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
// Method kron against its f64 form, step after step, and against what it is for: whitening.
#include "kernels/methods/kron.h"

#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/methods/kron_config.h"
#include "tests/reference/kron.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/gradient_stream.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using reference::Dense;
using testing::HasSubstr;

// The random numbers of the page: keyed by purpose (0: V, 1: balance), seed, update, block and the layer's name.
CounterRandom RandomOf(uint64_t purpose, uint64_t seed, uint64_t update, uint64_t block, const std::string& name) {
  std::vector<uint64_t> key = {purpose, seed, update, block};
  key.insert(key.end(), name.begin(), name.end());
  return CounterRandom(key);
}

reference::Kron MakeOracle(reference::KronOptions options, const std::string& name, uint64_t seed = 0,
                           double balance_probability = 0.01) {
  const std::vector<int64_t> rows = options.rows, cols = options.cols;
  const auto probe = [=](uint64_t update, uint64_t block) {
    Dense v(rows[block / cols.size()], cols[block % cols.size()]);
    std::vector<float> values(v.data.size());
    RandomOf(0, seed, update, block, name).Normals(0, absl::MakeSpan(values));
    v.data.assign(values.begin(), values.end());
    return v;
  };
  const auto balances = [=](uint64_t update) {
    const uint64_t bits = RandomOf(1, seed, update, 0, name).Bits(0);
    return static_cast<double>(bits >> 11) * 0x1p-53 < balance_probability;
  };
  return reference::Kron(std::move(options), probe, balances);
}

struct Case {
  std::string name;
  int64_t m, n;
  std::map<std::string, OptionValue> options;
  reference::KronOptions oracle;
  double scale = 1.0;
};

reference::KronOptions Plain(int64_t m, int64_t n) {
  reference::KronOptions options;
  options.rows = {m};
  options.cols = {n};
  options.diagonal_rows = m == 1;
  options.diagonal_cols = n == 1;
  return options;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool procrustes : {false, true}) {
    const std::map<std::string, OptionValue> variant = {
        {"variant", std::string(procrustes ? "PROCRUSTES" : "TRIANGULAR")}};
    const std::string suffix = procrustes ? "Procrustes" : "Triangular";
    const auto add = [&](const std::string& name, int64_t m, int64_t n, reference::KronOptions oracle,
                         std::map<std::string, OptionValue> options = {}, double scale = 1.0) {
      options.insert(variant.begin(), variant.end());
      oracle.procrustes = procrustes;
      cases.push_back({name + suffix, m, n, std::move(options), std::move(oracle), scale});
    };
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {1, 12}, {12, 1}, {16, 16}, {5, 23}, {23, 5}}) {
      add("Plain" + std::to_string(m) + "x" + std::to_string(n), m, n, Plain(m, n));
    }
    add("Tiny", 9, 14, Plain(9, 14), {}, 1e-6);
    add("Huge", 9, 14, Plain(9, 14), {}, 1e4);
    reference::KronOptions changed = Plain(9, 14);
    changed.momentum = 0;
    changed.lr = 0.3;
    changed.init_scale = 4;
    changed.max_probability = 0.5;
    changed.min_probability = 0.2;
    changed.decay = 0.05;
    changed.flat_steps = 10;
    changed.clip = 0.7;
    add("Options", 9, 14, changed,
        {{"momentum", 0.0},
         {"precondition_lr", 0.3},
         {"init_scale", 4.0},
         {"max_update_probability", 0.5},
         {"min_update_probability", 0.2},
         {"update_decay", 0.05},
         {"update_flat_steps", 10.0},
         {"rms_clip", 0.7}});
    reference::KronOptions one = Plain(9, 14), one_tall = Plain(14, 9), all = Plain(9, 14), large = Plain(9, 14);
    one.diagonal_cols = one_tall.diagonal_rows = large.diagonal_cols = true;
    all.diagonal_rows = all.diagonal_cols = true;
    add("OneDiag", 9, 14, one, {{"memory_save_mode", std::string("ONE_DIAG")}});
    add("OneDiagTall", 14, 9, one_tall, {{"memory_save_mode", std::string("ONE_DIAG")}});
    add("AllDiag", 9, 14, all, {{"memory_save_mode", std::string("ALL_DIAG")}});
    add("MaxSize", 9, 14, large, {{"max_size_triangular", 10.0}});
    reference::KronOptions blocks = Plain(9, 14), half = Plain(9, 14);
    blocks.rows = half.rows = {5, 4};
    blocks.cols = {5, 5, 4};
    half.diagonal_cols = true;
    add("Blocks", 9, 14, blocks, {{"block_size", 5.0}});
    add("BlocksOfOneSide", 9, 14, half, {{"block_size", 5.0}, {"max_size_triangular", 10.0}});
  }
  return cases;
}

class KronOracle : public testing::TestWithParam<Case> {};

// f32 against f64 over 150 gradients and about as many updates. Each update multiplies Q by factors within 1 +- lr, so
// that a rounding of it lives on as part of Q, which later gradients correct: the difference stays at some hundred
// roundings, and does not grow. 1e-4 is about 1700 of them; the largest seen is 2.5e-5.
TEST_P(KronOracle, GivesTheReferencesAnswers) {
  const Case& c = GetParam();
  const LayerSpec layer{"layer", c.m, c.n, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeKron({"kron", c.options}).value();
  LayerDriver driver(*method, layer, *backend);
  reference::Kron oracle = MakeOracle(c.oracle, layer.name);
  GradientStream gradients(c.m, c.n, 5, c.scale);
  for (int step = 1; step <= 150; ++step) {
    const Dense d = gradients.Next();
    const absl::StatusOr<reference::Vector> u = driver.Precondition(d.data);
    ASSERT_TRUE(u.ok()) << u.status();
    ASSERT_LE(RelativeDifference(*u, oracle.Step(d).data), 1e-4) << "gradient " << step;
    ASSERT_EQ(driver.state().version(), static_cast<uint64_t>(step));
  }
  EXPECT_GT(oracle.updates(), 20u);
  EXPECT_EQ(driver.state().bytes(), method->StateBytes(layer));
}

INSTANTIATE_TEST_SUITE_P(All, KronOracle, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

MethodConfig Config(const std::string& variant, std::map<std::string, OptionValue> options = {}) {
  options["variant"] = variant;
  return {"kron", options};
}

class KronVariants : public testing::TestWithParam<std::string> {};

TEST_P(KronVariants, BalanceAndSeedAreWhatTheySay) {
  const LayerSpec layer{"other", 6, 4, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method =
      MakeKron(Config(GetParam(), {{"balance_probability", 0.5}, {"seed", 77.0}})).value();
  const std::unique_ptr<Method> unseeded = MakeKron(Config(GetParam(), {{"balance_probability", 0.5}})).value();
  LayerDriver driver(*method, layer, *backend), other(*unseeded, layer, *backend);
  reference::KronOptions options = Plain(6, 4);
  options.procrustes = GetParam() == "PROCRUSTES";
  reference::Kron oracle = MakeOracle(options, "other", 77, 0.5);
  GradientStream gradients(6, 4, 9);
  for (int step = 0; step < 60; ++step) {
    const Dense d = gradients.Next();
    const reference::Vector u = driver.Precondition(d.data).value();
    ASSERT_LE(RelativeDifference(u, oracle.Step(d).data), 1e-4) << step;
    EXPECT_NE(other.Precondition(d.data).value(), u);
  }
}

// P is such that E[U U'] = n I and E[U' U] = m I. Gradients whose covariances have a condition of 467 come out with
// eigenvalues of .93 ... 1.10 (TRIANGULAR) and .72 ... .86 (PROCRUSTES, whose running bound of the step makes it
// slower).
TEST_P(KronVariants, Whitens) {
  constexpr int64_t kM = 10, kN = 16;
  const LayerSpec layer{"layer", kM, kN, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method =
      MakeKron(Config(GetParam(), {{"momentum", 0.0}, {"rms_clip", 100.0}, {"update_flat_steps", 1e6}})).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(kM, kN, 3, 1e-3, 0.0);
  Dense left(kM, kM), right(kN, kN), raw(kM, kM);
  constexpr int kBefore = 800, kSteps = 1600;
  for (int step = 0; step < kBefore + kSteps; ++step) {
    const Dense d = gradients.Next();
    Dense u(kM, kN);
    u.data = driver.Precondition(d.data).value();
    if (step < kBefore) continue;
    const auto add = [&](const Dense& x, const Dense& y, double others, Dense& sum) {
      sum = reference::Combination(1.0, sum, 1.0 / (kSteps * others), reference::Product(x, y));
    };
    add(u, reference::Transposed(u), kN, left);
    add(reference::Transposed(u), u, kM, right);
    add(d, reference::Transposed(d), kN, raw);
  }
  const reference::Vector of_rows = reference::SymmetricEigenvalues(left);
  const reference::Vector of_columns = reference::SymmetricEigenvalues(right);
  const reference::Vector before = reference::SymmetricEigenvalues(raw);
  EXPECT_GT(before.back() / before.front(), 300);
  EXPECT_GT(of_rows.front(), 0.6);
  EXPECT_LT(of_rows.back(), 1.3);
  EXPECT_GT(of_columns.front(), 0.6);
  EXPECT_LT(of_columns.back(), 1.3);
}

TEST_P(KronVariants, RefusesWhatIsNotFiniteAndStaysAsItWas) {
  const LayerSpec layer{"layer", 4, 7, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeKron(Config(GetParam())).value();
  LayerDriver driver(*method, layer, *backend);
  GradientStream gradients(4, 7, 1);
  for (int step = 0; step < 5; ++step) ASSERT_TRUE(driver.Precondition(gradients.Next().data).ok());
  const std::string before = driver.state().Save().value();
  for (const double bad : {std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    Dense d = gradients.Next();
    d.at(3, 5) = bad;
    const absl::Status status = driver.Precondition(d.data).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("layer layer: gradient"));
    EXPECT_EQ(driver.state().Save().value(), before);
  }
  EXPECT_TRUE(absl::IsInvalidArgument(driver.Update({reference::Vector(7, 1.0)}, {reference::Vector(4, 1.0)})));
  DeviceMatrix d = backend->Allocate(7, 4).value(), u = backend->Allocate(7, 4).value();
  const absl::Status shape = driver.state().Precondition(d.view(), u.view());
  EXPECT_TRUE(absl::IsInvalidArgument(shape));
  EXPECT_THAT(std::string(shape.message()), HasSubstr("expected [4, 7], got [7, 4]"));
  EXPECT_EQ(driver.state().Save().value(), before);
}

TEST_P(KronVariants, AFaultAtAnyOperationLeavesTheState) {
  const LayerSpec layer{"layer", 5, 6, false};
  const std::unique_ptr<Backend> cpu = MakeTestBackend();
  ForwardingBackend backend(*cpu);
  const std::unique_ptr<Method> method =
      MakeKron(Config(GetParam(), {{"block_size", 3.0}, {"balance_probability", 1.0}})).value();
  LayerDriver driver(*method, layer, backend);
  GradientStream gradients(5, 6, 1);
  for (int step = 0; step < 3; ++step) ASSERT_TRUE(driver.Precondition(gradients.Next().data).ok());
  const std::string before = driver.state().Save().value();
  const DeviceMatrix d = ToDevice(*cpu, {5, reference::Vector(6, 0.5)});
  DeviceMatrix u = cpu->Allocate(5, 6).value();
  int faults = 0;
  for (;; ++faults) {
    backend.FailAt(faults);
    const absl::Status status = driver.state().Precondition(d.view(), u.view());
    const bool failed = backend.failed();
    backend.NeverFail();
    if (!failed) break;
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    ASSERT_EQ(driver.state().Save().value(), before) << "operation " << faults;
  }
  EXPECT_GT(faults, 50);
  EXPECT_EQ(driver.state().version(), 4u);
}

TEST_P(KronVariants, RepeatsItsAnswerAndTakesNothingIn) {
  const LayerSpec layer{"layer", 5, 6, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeKron(Config(GetParam(), {{"block_size", 3.0}})).value();
  LayerDriver driver(*method, layer, *backend), loaded(*method, layer, *backend);
  EXPECT_TRUE(absl::IsFailedPrecondition(driver.Repeat().status()));
  GradientStream gradients(5, 6, 1);
  for (int step = 0; step < 20; ++step) {
    const reference::Vector u = driver.Precondition(gradients.Next().data).value();
    const std::string after = driver.state().Save().value();
    EXPECT_EQ(driver.Repeat().value(), u);
    ASSERT_TRUE(loaded.state().Load(after).ok());
    EXPECT_EQ(loaded.Repeat().value(), u);
    EXPECT_EQ(driver.state().Save().value(), after);
    EXPECT_EQ(loaded.state().Save().value(), after);
  }
}

// An unused layer's factors would grow by 1 + lr an update, beyond f32 after a thousand.
TEST_P(KronVariants, ZeroGradientsTeachNothing) {
  const LayerSpec layer{"layer", 5, 6, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeKron(Config(GetParam(), {{"update_flat_steps", 1e6}})).value();
  LayerDriver driver(*method, layer, *backend), fresh(*method, layer, *backend);
  const reference::Vector zero(30, 0.0);
  for (int step = 0; step < 2000; ++step) ASSERT_EQ(driver.Precondition(zero).value(), zero);
  GradientStream gradients(5, 6, 1);
  const Dense d = gradients.Next();
  EXPECT_TRUE(std::isfinite(Norm(driver.Precondition(d.data).value())));
}

INSTANTIATE_TEST_SUITE_P(All, KronVariants, testing::Values("TRIANGULAR", "PROCRUSTES"));

TEST(KronConfigTest, TheScheduleIsTheFormula) {
  const KronConfig config = ParseKronConfig({"kron", {}}).value();
  EXPECT_EQ(config.UpdateProbability(1), 1.0);
  EXPECT_EQ(config.UpdateProbability(500), 1.0);
  EXPECT_NEAR(config.UpdateProbability(1500), std::exp(-1.0), 1e-12);
  EXPECT_EQ(config.UpdateProbability(4100), 0.03) << "exp(-3.6) = 0.027";
}

TEST(KronConfigTest, DiagonalSidesFollowTheRules) {
  const auto parse = [](std::map<std::string, OptionValue> options) {
    return ParseKronConfig({"kron", std::move(options)}).value();
  };
  const KronConfig plain = parse({}), one = parse({{"memory_save_mode", std::string("ONE_DIAG")}}),
                   all = parse({{"memory_save_mode", std::string("ALL_DIAG")}}),
                   small = parse({{"max_size_triangular", 10.0}});
  EXPECT_FALSE(plain.DiagonalRows(8192, 5) || plain.DiagonalColumns(8192, 5));
  EXPECT_TRUE(plain.DiagonalRows(8193, 5) && plain.DiagonalRows(1, 5) && plain.DiagonalColumns(5, 1));
  EXPECT_TRUE(one.DiagonalRows(6, 5) && one.DiagonalColumns(5, 5) && one.DiagonalColumns(5, 6));
  EXPECT_FALSE(one.DiagonalRows(5, 5) || one.DiagonalColumns(6, 5) || one.DiagonalRows(5, 6));
  EXPECT_TRUE(all.DiagonalRows(3, 5) && all.DiagonalColumns(3, 5));
  EXPECT_TRUE(small.DiagonalRows(11, 5) && small.DiagonalColumns(5, 11));
  EXPECT_FALSE(small.DiagonalRows(10, 5) || small.DiagonalColumns(5, 10));
  EXPECT_EQ(parse({{"block_size", 5.0}}).Blocks(14, false), (std::vector<int64_t>{5, 5, 4}));
  EXPECT_EQ(parse({{"block_size", 5.0}}).Blocks(14, true), std::vector<int64_t>{14});
  EXPECT_EQ(plain.Blocks(14, false), std::vector<int64_t>{14});
}

TEST(KronConfigTest, RefusesOptionsByName) {
  const std::vector<std::pair<std::string, OptionValue>> cases = {{"variant", std::string("CHOLESKY")},
                                                                  {"momentum", 1.0},
                                                                  {"precondition_lr", 0.0},
                                                                  {"init_scale", -1.0},
                                                                  {"max_update_probability", 0.0},
                                                                  {"min_update_probability", 2.0},
                                                                  {"update_decay", -1.0},
                                                                  {"balance_probability", 1.5},
                                                                  {"max_size_triangular", 1.5},
                                                                  {"memory_save_mode", true},
                                                                  {"block_size", -1.0},
                                                                  {"rms_clip", 0.0},
                                                                  {"seed", 0.5},
                                                                  {"gamma", 0.5}};
  for (const auto& [name, value] : cases) {
    const absl::Status status = ParseKronConfig({"kron", {{name, value}}}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr("option " + name)) << status;
  }
  EXPECT_THAT(std::string(ParseKronConfig({"kron", {{"max_update_probability", 0.1}, {"min_update_probability", 0.2}}})
                              .status()
                              .message()),
              HasSubstr("min_update_probability: expected at most 0.1"));
}

}  // namespace
}  // namespace precondor

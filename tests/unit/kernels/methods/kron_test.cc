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
#include "kernels/methods/kron_block.h"
#include "tests/reference/kron.h"
#include "tests/support/faulty_backend.h"
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
  const auto probe = [=](uint64_t update, uint64_t block, int64_t elements) {
    std::vector<float> values(elements);
    RandomOf(0, seed, update, block, name).Normals(0, absl::MakeSpan(values));
    return reference::Vector(values.begin(), values.end());
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
  std::vector<int64_t> shape = {};
};

// Each dimension whole; those of one element are diagonal.
reference::KronOptions Plain(const std::vector<int64_t>& dims) {
  reference::KronOptions options;
  for (const int64_t d : dims) {
    options.sides.push_back({d});
    options.diagonal.push_back(d == 1);
  }
  return options;
}

// Tensors of several dimensions, and of one. Which dimensions are merged follows from the penalty in tensor.h.
std::vector<Case> TensorCases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, reference::KronOptions oracle,
                       std::map<std::string, OptionValue> options) {
    int64_t rest = 1;
    for (size_t k = 1; k < shape.size(); ++k) rest *= shape[k];
    cases.push_back({name, shape[0], rest, std::move(options), std::move(oracle), 1.0, shape});
  };
  const auto text = [](const char* value) { return OptionValue(std::string(value)); };
  const OptionValue no(false);
  add("Shape5x4x3", {5, 4, 3}, Plain({5, 4, 3}), {{"merge_small_dims", no}});
  add("Shape2x3x2x2x3", {2, 3, 2, 2, 3}, Plain({2, 3, 2, 2, 3}), {{"merge_small_dims", no}});
  add("ShapeWithOnes", {1, 6, 1, 4}, Plain({1, 6, 1, 4}), {{"merge_small_dims", no}});
  add("ShapeOneMergedAway", {6, 1, 4}, Plain({6, 4}), {{"target_merged_dim_size", 6.0}});
  add("ShapeMergedToMatrix", {8, 3, 2, 2}, Plain({8, 12}), {{"target_merged_dim_size", 10.0}});
  add("ShapeMergedToOther", {3, 2, 2, 8}, Plain({12, 8}), {{"target_merged_dim_size", 10.0}});
  add("ShapeMergedToThree", {8, 7, 3, 2}, Plain({8, 7, 6}), {{"target_merged_dim_size", 7.0}});
  add("ShapeMergedToOne", {5, 4, 3}, Plain({60}), {});
  reference::KronOptions vector = Plain({13}), scaled = Plain({4, 3, 2, 5});
  scaled.init_scale = 3;
  add("Shape4x3x2x5", {4, 3, 2, 5}, scaled, {{"merge_small_dims", no}, {"init_scale", 3.0}});
  add("ShapeVectorTriangular", {13}, vector, {{"min_ndim_triangular", 1.0}});
  vector.diagonal = {true};
  add("ShapeVector", {13}, vector, {});
  reference::KronOptions diagonal = Plain({5, 4, 6}), skew = Plain({3, 9, 2}), one = Plain({5, 4, 5});
  diagonal.diagonal = {false, false, true};
  add("ShapeLongSide", {5, 4, 6}, diagonal, {{"merge_small_dims", no}, {"max_size_triangular", 5.0}});
  diagonal.diagonal = {true, true, true};
  add("ShapeAllDiag", {5, 4, 6}, diagonal, {{"merge_small_dims", no}, {"memory_save_mode", text("ALL_DIAG")}});
  add("ShapeTooFewDims", {5, 4, 6}, diagonal, {{"merge_small_dims", no}, {"min_ndim_triangular", 4.0}});
  one.diagonal = {false, false, true};
  add("ShapeOneDiag", {5, 4, 5}, one, {{"merge_small_dims", no}, {"memory_save_mode", text("ONE_DIAG")}});
  skew.diagonal = {false, true, false};  // 9 squared > 54
  add("ShapeSkew", {3, 9, 2}, skew, {{"merge_small_dims", no}, {"max_skew", 1.0}});
  reference::KronOptions blocks = Plain({5, 4, 7}), mixed = Plain({7, 9, 3, 5});
  blocks.sides = {{3, 2}, {2, 2}, {3, 2, 2}};
  add("ShapeBlocks", {5, 4, 7}, blocks, {{"merge_small_dims", no}, {"block_size", 3.0}});
  mixed.sides = {{4, 3}, {9}, {3}, {3, 2}};
  mixed.diagonal = {false, true, false, false};
  add("ShapeBlocksOfSome", {7, 9, 3, 5}, mixed,
      {{"merge_small_dims", no}, {"block_size", 4.0}, {"max_size_triangular", 8.0}});
  return cases;
}

std::vector<Case> Cases() {
  std::vector<Case> cases = TensorCases();
  const auto add = [&](const std::string& name, int64_t m, int64_t n, reference::KronOptions oracle,
                       std::map<std::string, OptionValue> options = {}, double scale = 1.0) {
    cases.push_back({name, m, n, std::move(options), std::move(oracle), scale});
  };
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {1, 12}, {12, 1}, {16, 16}, {5, 23}, {23, 5}}) {
    add("Plain" + std::to_string(m) + "x" + std::to_string(n), m, n, Plain({m, n}));
  }
  add("Tiny", 9, 14, Plain({9, 14}), {}, 1e-6);
  add("Huge", 9, 14, Plain({9, 14}), {}, 1e4);
  reference::KronOptions changed = Plain({9, 14});
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
  reference::KronOptions one = Plain({9, 14}), one_tall = Plain({14, 9}), all = Plain({9, 14}), large = Plain({9, 14});
  one.diagonal[1] = one_tall.diagonal[0] = large.diagonal[1] = true;
  all.diagonal = {true, true};
  add("OneDiag", 9, 14, one, {{"memory_save_mode", std::string("ONE_DIAG")}});
  add("OneDiagTall", 14, 9, one_tall, {{"memory_save_mode", std::string("ONE_DIAG")}});
  add("AllDiag", 9, 14, all, {{"memory_save_mode", std::string("ALL_DIAG")}});
  add("MaxSize", 9, 14, large, {{"max_size_triangular", 10.0}});
  reference::KronOptions blocks = Plain({9, 14}), half = Plain({9, 14});
  blocks.sides = {{5, 4}, {5, 5, 4}};
  half.sides[0] = {5, 4};
  half.diagonal[1] = true;
  add("Blocks", 9, 14, blocks, {{"block_size", 5.0}});
  add("BlocksOfOneSide", 9, 14, half, {{"block_size", 5.0}, {"max_size_triangular", 10.0}});
  return cases;
}

class KronOracle : public testing::TestWithParam<Case> {};

// f32 against f64 over 150 gradients and about as many updates. Each update multiplies Q by factors within 1 +- lr, so
// that a rounding of it lives on as part of Q, which later gradients correct: the difference stays at some hundred
// roundings, and does not grow. 1e-4 is about 1700 of them; the largest seen is 2.5e-5.
TEST_P(KronOracle, GivesTheReferencesAnswers) {
  const Case& c = GetParam();
  const LayerSpec layer{"layer", c.m, c.n, false, c.shape};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = MakeKron({"kron", c.options}).value();
  LayerDriver driver(*method, layer, *backend);
  reference::Kron oracle = MakeOracle(c.oracle, layer.name);
  GradientStream gradients(c.m, c.n, 5, c.scale);
  for (int step = 1; step <= 150; ++step) {
    const Dense d = gradients.Next();
    const absl::StatusOr<reference::Vector> u = driver.Precondition(d.data);
    ASSERT_TRUE(u.ok()) << u.status();
    ASSERT_LE(RelativeDifference(*u, oracle.Step(d.data)), 1e-4) << "gradient " << step;
    ASSERT_EQ(driver.state().version(), static_cast<uint64_t>(step));
  }
  EXPECT_GT(oracle.updates(), 20u);
  EXPECT_EQ(driver.state().bytes(), method->StateBytes(layer));
}

INSTANTIATE_TEST_SUITE_P(All, KronOracle, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

std::unique_ptr<Method> Make(std::map<std::string, OptionValue> options) {
  return MakeKron({"kron", std::move(options)}).value();
}

TEST(KronTest, BalanceAndSeedAreWhatTheySay) {
  const LayerSpec layer{"other", 6, 4, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make({{"balance_probability", 0.5}, {"seed", 77.0}});
  const std::unique_ptr<Method> unseeded = Make({{"balance_probability", 0.5}});
  LayerDriver driver(*method, layer, *backend), other(*unseeded, layer, *backend);
  reference::KronOptions options = Plain({6, 4});
  reference::Kron oracle = MakeOracle(options, "other", 77, 0.5);
  GradientStream gradients(6, 4, 9);
  for (int step = 0; step < 60; ++step) {
    const Dense d = gradients.Next();
    const reference::Vector u = driver.Precondition(d.data).value();
    ASSERT_LE(RelativeDifference(u, oracle.Step(d.data)), 1e-4) << step;
    EXPECT_NE(other.Precondition(d.data).value(), u);
  }
}

// P is such that E[U U'] = n I and E[U' U] = m I. Gradients whose covariances have a condition of 467 come out with
// eigenvalues of .93 ... 1.10.
TEST(KronTest, Whitens) {
  constexpr int64_t kM = 10, kN = 16;
  const LayerSpec layer{"layer", kM, kN, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make({{"momentum", 0.0}, {"rms_clip", 100.0}, {"update_flat_steps", 1e6}});
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

// In a row-major tensor a mode between others has no matrix, so that other code runs than for matrices.
TEST(KronTest, ATensorsStateIsKeptAsAMatrixs) {
  const LayerSpec layer{"layer", 6, 20, false, {3, 2, 4, 5}};
  const std::unique_ptr<Backend> cpu = MakeTestBackend();
  FaultyBackend backend(*cpu);
  const std::unique_ptr<Method> method =
      Make({{"block_size", 3.0}, {"balance_probability", 1.0}, {"merge_small_dims", false}});
  LayerDriver driver(*method, layer, backend), loaded(*method, layer, backend);
  GradientStream gradients(6, 20, 1);
  const int64_t before_bytes = cpu->allocated_bytes();
  for (int step = 0; step < 3; ++step) {
    const reference::Vector u = driver.Precondition(gradients.Next().data).value();
    EXPECT_EQ(driver.Repeat().value(), u);
    ASSERT_TRUE(loaded.state().Load(driver.state().Save().value()).ok());
    EXPECT_EQ(loaded.Repeat().value(), u);
  }
  EXPECT_EQ(cpu->allocated_bytes(), before_bytes);
  const std::string before = driver.state().Save().value();
  const DeviceMatrix d = ToDevice(*cpu, reference::Vectors(6, reference::Vector(20, 0.5)));
  DeviceMatrix wide = cpu->Allocate(6, 32).value();
  const MatrixView u = wide.view().Corner(6, 20);  // not contiguous, as a tensor has to be
  int faults = 0;
  for (;; ++faults) {
    backend.FailAt(faults);
    const absl::Status status = driver.state().Precondition(d.view(), u);
    const bool failed = backend.failed();
    backend.NeverFail();
    if (!failed) break;
    ASSERT_EQ(driver.state().Save().value(), before) << "operation " << faults;
  }
  EXPECT_GT(faults, 100);
  LayerDriver other(*method, layer, backend);
  ASSERT_TRUE(other.state().Load(before).ok());
  const reference::Vector same = other.Precondition(reference::Vector(120, 0.5)).value();
  reference::Vector got;
  for (const reference::Vector& row : ToHost(*cpu, u)) got.insert(got.end(), row.begin(), row.end());
  EXPECT_EQ(got, same);
}

// An unused layer's factors would grow by 1 + lr an update, beyond f32 after a thousand.
TEST(KronTest, ZeroGradientsTeachNothing) {
  const LayerSpec layer{"layer", 5, 6, false};
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  const std::unique_ptr<Method> method = Make({{"update_flat_steps", 1e6}});
  LayerDriver driver(*method, layer, *backend), fresh(*method, layer, *backend);
  const reference::Vector zero(30, 0.0);
  for (int step = 0; step < 2000; ++step) ASSERT_EQ(driver.Precondition(zero).value(), zero);
  GradientStream gradients(5, 6, 1);
  const Dense d = gradients.Next();
  EXPECT_TRUE(std::isfinite(Norm(driver.Precondition(d.data).value())));
}

TEST(KronConfigTest, TheScheduleIsTheFormula) {
  const KronConfig config = ParseKronConfig({"kron", {}}).value();
  EXPECT_EQ(config.UpdateProbability(1), 1.0);
  EXPECT_EQ(config.UpdateProbability(500), 1.0);
  EXPECT_NEAR(config.UpdateProbability(1500), std::exp(-1.0), 1e-12);
  EXPECT_EQ(config.UpdateProbability(4100), 0.03) << "exp(-3.6) = 0.027";
}

TEST(KronConfigTest, DiagonalSidesFollowTheRules) {
  const auto diagonal = [](std::map<std::string, OptionValue> options, const std::vector<int64_t>& sides,
                           size_t ndim = 2) {
    return ParseKronConfig({"kron", std::move(options)}).value().Diagonal(sides, ndim);
  };
  using Flags = std::vector<bool>;
  const std::map<std::string, OptionValue> one = {{"memory_save_mode", std::string("ONE_DIAG")}},
                                           all = {{"memory_save_mode", std::string("ALL_DIAG")}},
                                           small = {{"max_size_triangular", 10.0}}, skew = {{"max_skew", 2.0}};
  EXPECT_EQ(diagonal({}, {8192, 5}), Flags({false, false}));
  EXPECT_EQ(diagonal({}, {8193, 5}), Flags({true, false}));
  EXPECT_EQ(diagonal({}, {1, 5}), Flags({true, false}));
  EXPECT_EQ(diagonal({}, {5, 1}), Flags({false, true}));
  EXPECT_EQ(diagonal({}, {5}, 1), Flags({true}));
  EXPECT_EQ(diagonal({}, {60}, 3), Flags({false})) << "three dimensions before they were merged";
  EXPECT_EQ(diagonal({{"min_ndim_triangular", 3.0}}, {5, 4}), Flags({true, true}));
  EXPECT_EQ(diagonal({{"min_ndim_triangular", 0.0}}, {5}, 1), Flags({false}));
  EXPECT_EQ(diagonal(one, {6, 5}), Flags({true, false}));
  EXPECT_EQ(diagonal(one, {5, 5}), Flags({false, true}));
  EXPECT_EQ(diagonal(one, {5, 6}), Flags({false, true}));
  EXPECT_EQ(diagonal(one, {5, 7, 3, 7}, 4), Flags({false, false, false, true}));
  EXPECT_EQ(diagonal(all, {3, 5, 4}, 3), Flags({true, true, true}));
  EXPECT_EQ(diagonal(small, {11, 5}), Flags({true, false}));
  EXPECT_EQ(diagonal(small, {10, 11, 5}, 3), Flags({false, true, false}));
  EXPECT_EQ(diagonal(skew, {10, 5}), Flags({false, false})) << "100 = 2 x 50";
  EXPECT_EQ(diagonal(skew, {11, 5}), Flags({true, false})) << "121 > 2 x 55";
}

// distributed_kron looks at the dimensions before they are merged: a product of 9408 would stay triangular, and with
// ONE_DIAG none of the two sides below would be diagonal.
TEST(KronConfigTest, LimitsHoldForTheSidesAsMerged) {
  const LayerSpec layer{"conv", 64, 147, false, {64, 3, 7, 7}};
  const std::map<std::string, OptionValue> target = {{"target_merged_dim_size", 4096.0}};
  const std::vector<int64_t> sides = ParseKronConfig({"kron", target}).value().Sides(layer);
  EXPECT_EQ(sides, (std::vector<int64_t>{64, 147}));
  const KronConfig one = ParseKronConfig({"kron", {{"memory_save_mode", std::string("ONE_DIAG")}}}).value();
  EXPECT_EQ(one.Sides(layer), sides);
  EXPECT_EQ(one.Diagonal(sides, 4), (std::vector<bool>{false, true}));
}

// There a small one becomes a vector: 64 x 64 one side of 4096.
TEST(KronConfigTest, MatricesAreNotMerged) {
  const std::vector<int64_t> square = {64, 64}, as_stated = {16, 4, 64};
  const KronConfig large = ParseKronConfig({"kron", {{"target_merged_dim_size", 4096.0}}}).value();
  EXPECT_EQ(large.Sides({"w", 64, 64}), square);
  EXPECT_EQ(large.Sides({"w", 64, 64, false, square}), square);
  EXPECT_EQ(large.Sides({"w", 64, 64, false, as_stated}), std::vector<int64_t>{4096});
  const KronConfig off = ParseKronConfig({"kron", {{"merge_small_dims", false}}}).value();
  EXPECT_EQ(off.Sides({"w", 64, 64, false, as_stated}), as_stated);
}

TEST(KronConfigTest, BlocksAreEqual) {
  const KronConfig config = ParseKronConfig({"kron", {{"block_size", 5.0}}}).value();
  EXPECT_EQ(config.Blocks(14, false), (std::vector<int64_t>{5, 5, 4}));
  EXPECT_EQ(config.Blocks(14, true), std::vector<int64_t>{14});
  EXPECT_EQ(ParseKronConfig({"kron", {}}).value().Blocks(14, false), std::vector<int64_t>{14});
}

TEST(KronConfigTest, RefusesAMinimumAboveTheMaximum) {
  EXPECT_THAT(std::string(ParseKronConfig({"kron", {{"max_update_probability", 0.1}, {"min_update_probability", 0.2}}})
                              .status()
                              .message()),
              HasSubstr("min_update_probability: expected at most 0.1"));
}

}  // namespace
}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/optimizer.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/reference/optimizers.h"

namespace precondor {
namespace {

using reference::Vec;
using ::testing::HasSubstr;

constexpr int kSteps = 40;
constexpr double kRate = 0.05;

// A weight [rows, cols] with a stride that is larger than cols; what lies between is a guard that must not change.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols)
      : rows_(rows), cols_(cols), data_(static_cast<size_t>(rows * (cols + kGap)), kGuard) {}
  MatrixView view() { return MatrixView(data_.data(), rows_, cols_, cols_ + kGap); }
  void Fill(std::mt19937_64& rng, double scale) {
    std::normal_distribution<double> normal(0, scale);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) view().at(i, j) = static_cast<float>(normal(rng));
    }
  }
  Vec Columns(int64_t begin, int64_t end) {
    Vec out;
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = begin; j < end; ++j) out.push_back(view().at(i, j));
    }
    return out;
  }
  bool GuardIntact() {
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < kGap; ++j) {
        if (data_[static_cast<size_t>(i * (cols_ + kGap) + cols_ + j)] != kGuard) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kGap = 3;
  static constexpr float kGuard = 12345.0f;
  const int64_t rows_, cols_;
  std::vector<float> data_;
};

std::unique_ptr<Optimizer> Make(const OptimizerConfig& config) {
  auto optimizer = MakeOptimizer(config);
  EXPECT_TRUE(optimizer.ok()) << optimizer.status();
  return *std::move(optimizer);
}

// Weight proper and bias column of a [4, 6] layer with bias, and a bias-free [3, 5] one, as three f64 tensors.
struct Model {
  Matrix w1{4, 6}, g1{4, 6}, w2{3, 5}, g2{3, 5};
  std::vector<Vec> want;
  std::vector<double> decays;

  explicit Model(double decay) : decays{decay, 0.0, decay} {
    std::mt19937_64 rng(7);
    w1.Fill(rng, 1.0);
    w2.Fill(rng, 0.1);
    want = {w1.Columns(0, 5), w1.Columns(5, 6), w2.Columns(0, 5)};
  }
  std::vector<Vec> NextGradients(std::mt19937_64& rng) {
    g1.Fill(rng, 2.0);
    g2.Fill(rng, 0.01);
    return {g1.Columns(0, 5), g1.Columns(5, 6), g2.Columns(0, 5)};
  }
  std::vector<Parameter> Parameters() { return {{w1.view(), g1.view(), true}, {w2.view(), g2.view(), false}}; }
  // f32 rounding of kSteps updates: about kSteps half-ulps of weights of size 1, times a few operations a step.
  void ExpectEqual() {
    const std::vector<Vec> have = {w1.Columns(0, 5), w1.Columns(5, 6), w2.Columns(0, 5)};
    for (size_t t = 0; t < have.size(); ++t) {
      for (size_t i = 0; i < have[t].size(); ++i) {
        EXPECT_NEAR(have[t][i], want[t][i], 2e-5 * (1 + std::abs(want[t][i]))) << "tensor " << t << " element " << i;
      }
    }
    EXPECT_TRUE(w1.GuardIntact());
    EXPECT_TRUE(w2.GuardIntact());
  }
};

class SgdTest : public ::testing::TestWithParam<bool> {};

TEST_P(SgdTest, FollowsTheFormula) {
  OptimizerConfig config;
  config.name = "sgd";
  config.nesterov = GetParam();
  config.weight_decay = 0.01;
  auto optimizer = Make(config);
  Model model(config.weight_decay);
  std::vector<reference::SgdState> states(3);
  std::mt19937_64 rng(1);
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<Vec> g = model.NextGradients(rng);
    for (size_t t = 0; t < 3; ++t) {
      reference::SgdStep(kRate, 0.9, config.nesterov, model.decays[t], g[t], model.want[t], states[t]);
    }
    ASSERT_TRUE(optimizer->Step(model.Parameters(), kRate).ok());
  }
  model.ExpectEqual();
}

INSTANTIATE_TEST_SUITE_P(Nesterov, SgdTest, ::testing::Bool());

TEST(AdamWTest, FollowsTheFormulaWithBiasFreeOfDecay) {
  OptimizerConfig config;
  config.weight_decay = 0.3;
  auto optimizer = Make(config);
  Model model(config.weight_decay);
  std::vector<reference::AdamState> states(3);
  std::mt19937_64 rng(2);
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<Vec> g = model.NextGradients(rng);
    for (size_t t = 0; t < 3; ++t) {
      reference::AdamWStep(kRate, 0.9, 0.999, 1e-8, model.decays[t], g[t], model.want[t], states[t]);
    }
    ASSERT_TRUE(optimizer->Step(model.Parameters(), kRate).ok());
  }
  model.ExpectEqual();
}

struct LambCase {
  double decay;
  bool nvlamb;
  double max_norm;
};

class LambTest : public ::testing::TestWithParam<LambCase> {};

TEST_P(LambTest, FollowsTheFormulaWithWeightAndBiasApart) {
  OptimizerConfig config;
  config.name = "lamb";
  config.weight_decay = GetParam().decay;
  config.nvlamb = GetParam().nvlamb;
  config.max_grad_norm = GetParam().max_norm;
  auto optimizer = Make(config);
  Model model(config.weight_decay);
  std::vector<reference::AdamState> states(3);
  std::mt19937_64 rng(3);
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<Vec> g = model.NextGradients(rng);
    const double norm = std::hypot(reference::Norm(g[0]), reference::Norm(g[1]), reference::Norm(g[2]));
    for (size_t t = 0; t < 3; ++t) {
      reference::LambStep(kRate, 0.9, 0.999, 1e-6, model.decays[t], config.nvlamb, config.max_grad_norm, norm, g[t],
                          model.want[t], states[t]);
    }
    ASSERT_TRUE(optimizer->Step(model.Parameters(), kRate).ok());
  }
  model.ExpectEqual();
}

INSTANTIATE_TEST_SUITE_P(Cases, LambTest,
                         ::testing::Values(LambCase{0.01, false, 1.0}, LambCase{0.01, true, 1.0},
                                           LambCase{0.0, false, 1.0}, LambCase{0.0, true, 0.0},
                                           LambCase{0.1, false, 1000.0}));

TEST(LambTest, ZeroWeightsMoveWithoutATrustRatio) {
  OptimizerConfig config;
  config.name = "lamb";
  config.weight_decay = 0.1;
  auto optimizer = Make(config);
  std::vector<float> w = {0, 0}, g = {0.3f, -0.1f};
  const Parameter parameter{MatrixView(w.data(), 1, 2), ConstMatrixView(g.data(), 1, 2), false};
  ASSERT_TRUE(optimizer->Step({parameter}, 0.5).ok());
  // The first Adam direction is the sign of the gradient.
  EXPECT_NEAR(w[0], -0.5, 1e-4);
  EXPECT_NEAR(w[1], 0.5, 1e-4);
}

TEST(OptimizerTest, ABiasColumnAloneIsAParameter) {
  OptimizerConfig config;
  config.weight_decay = 0.5;
  auto optimizer = Make(config);
  std::vector<float> w = {1, 2}, g = {0, 0};
  const Parameter parameter{MatrixView(w.data(), 2, 1), ConstMatrixView(g.data(), 2, 1), true};
  ASSERT_TRUE(optimizer->Step({parameter}, 0.5).ok());
  EXPECT_EQ(w, (std::vector<float>{1, 2}));
}

TEST(OptimizerTest, RefusesOtherShapesAndChangesNothing) {
  auto optimizer = Make({});
  Matrix w(2, 3), g(2, 3), other(3, 2);
  std::mt19937_64 rng(4);
  w.Fill(rng, 1);
  g.Fill(rng, 1);
  other.Fill(rng, 1);
  ASSERT_TRUE(optimizer->Step({{w.view(), g.view(), false}}, 0.1).ok());
  const Vec before = w.Columns(0, 3);

  const auto expect_refused = [&](const std::vector<Parameter>& parameters, double rate, const char* text) {
    const absl::Status status = optimizer->Step(parameters, rate);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_EQ(w.Columns(0, 3), before);
  };
  expect_refused({{w.view(), other.view(), false}}, 0.1, "weight is [2, 3], gradient is [3, 2]");
  expect_refused({{other.view(), other.view(), false}}, 0.1, "expected [2, 3] as at first, got [3, 2]");
  expect_refused({{w.view(), g.view(), true}}, 0.1, "got [2, 3] with bias");
  expect_refused({{w.view(), g.view(), false}, {w.view(), g.view(), false}}, 0.1, "expected 1 parameters");
  expect_refused({{w.view(), g.view(), false}}, -0.1, "learning rate");
  expect_refused({{w.view(), g.view(), false}}, std::numeric_limits<double>::quiet_NaN(), "learning rate");
}

class OptimizerStateTest : public ::testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Optimizer> Make(const std::string& name) {
    OptimizerConfig config;
    config.name = name;
    config.weight_decay = 0.1;
    return *MakeOptimizer(config);
  }
};

TEST_P(OptimizerStateTest, GoesOnBitwiseFromWhatWasSaved) {
  std::mt19937_64 rng(3);
  Matrix weight(4, 3), gradient(4, 3);
  weight.Fill(rng, 1);
  const auto first = Make(GetParam());
  const auto step = [&](Optimizer& optimizer, Matrix& w, uint64_t seed) {
    std::mt19937_64 own(seed);
    gradient.Fill(own, 1);
    ASSERT_TRUE(optimizer.Step({Parameter{w.view(), gradient.view(), true}}, kRate).ok());
  };
  for (uint64_t s = 0; s < 5; ++s) step(*first, weight, s);
  const std::string saved = first->SaveState();
  Matrix other = weight;
  const auto second = Make(GetParam());
  ASSERT_TRUE(second->LoadState(saved).ok());
  EXPECT_EQ(second->SaveState(), saved);
  for (uint64_t s = 5; s < 20; ++s) {
    step(*first, weight, s);
    step(*second, other, s);
  }
  EXPECT_EQ(weight.Columns(0, 3), other.Columns(0, 3));
  Matrix wide(4, 4);
  EXPECT_FALSE(second->Step({Parameter{wide.view(), wide.view(), true}}, kRate).ok()) << "shapes are part of it";
}

TEST_P(OptimizerStateTest, RefusesOtherBytesAndChangesNothing) {
  std::mt19937_64 rng(3);
  Matrix weight(2, 3), gradient(2, 3);
  weight.Fill(rng, 1);
  gradient.Fill(rng, 1);
  const auto optimizer = Make(GetParam());
  ASSERT_TRUE(optimizer->Step({Parameter{weight.view(), gradient.view(), false}}, kRate).ok());
  const std::string saved = optimizer->SaveState();
  for (size_t size = 0; size < saved.size(); ++size) {
    EXPECT_EQ(optimizer->LoadState(saved.substr(0, size)).code(), absl::StatusCode::kInvalidArgument) << size;
  }
  EXPECT_FALSE(optimizer->LoadState(saved + "x").ok());
  std::string huge = saved;
  huge[8 + std::string("precondor optimizer 1 ").size() + std::string(GetParam()).size() + 8 + 8 + 5] = '\x7f';
  EXPECT_FALSE(optimizer->LoadState(huge).ok()) << "rows beyond the end of the state";
  const auto another = Make(std::string(GetParam()) == "sgd" ? "lamb" : "sgd");
  EXPECT_THAT(std::string(another->LoadState(saved).message()), HasSubstr(GetParam()));
  EXPECT_EQ(optimizer->SaveState(), saved);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizerStateTest, ::testing::Values("sgd", "adamw", "lamb"));

TEST(OptimizerTest, NamesTheBadOption) {
  const auto message = [](auto change) {
    OptimizerConfig config;
    change(config);
    return std::string(MakeOptimizer(config).status().message());
  };
  EXPECT_THAT(message([](OptimizerConfig& c) { c.name = "adagrad"; }), HasSubstr("got \"adagrad\""));
  EXPECT_THAT(message([](OptimizerConfig& c) { c.beta1 = 1; }), HasSubstr("beta1: expected a number in [0, 1), got 1"));
  EXPECT_THAT(message([](OptimizerConfig& c) { c.beta2 = -1; }), HasSubstr("beta2"));
  EXPECT_THAT(message([](OptimizerConfig& c) { c.epsilon = 0; }), HasSubstr("epsilon: expected a number in (0"));
  EXPECT_THAT(message([](OptimizerConfig& c) { c.weight_decay = -1; }), HasSubstr("weight_decay"));
  EXPECT_THAT(message([](OptimizerConfig& c) { c.max_grad_norm = -1; }), HasSubstr("max_grad_norm"));
  EXPECT_THAT(message([](OptimizerConfig& c) { c.momentum = 1.5; }), HasSubstr("momentum"));
  EXPECT_THAT(message([](OptimizerConfig& c) {
                c.name = "sgd";
                c.momentum = 0;
                c.nesterov = true;
              }),
              HasSubstr("nesterov"));
}

}  // namespace
}  // namespace precondor

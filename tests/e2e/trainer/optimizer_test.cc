// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/optimizer.h"

#include <cmath>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include "tests/e2e/trainer/host_matrix.h"
#include "tests/reference/optimizers.h"

namespace precondor {
namespace {

using digits::HostMatrix;
using reference::Vec;

constexpr double kRate = 0.05;

void Fill(HostMatrix& matrix, std::mt19937_64& rng, double scale) {
  std::normal_distribution<double> normal(0, scale);
  for (float& value : matrix.data()) value = static_cast<float>(normal(rng));
}

Vec Columns(const HostMatrix& matrix, int64_t begin, int64_t end) {
  Vec out;
  for (int64_t i = 0; i < matrix.rows(); ++i) {
    for (int64_t j = begin; j < end; ++j) out.push_back(matrix.view().at(i, j));
  }
  return out;
}

// Two layers, whose weights and bias columns are four tensors.
struct Model {
  HostMatrix w1{4, 6}, g1{4, 6}, w2{3, 5}, g2{3, 5};

  Model() {
    std::mt19937_64 rng(7);
    Fill(w1, rng, 1.0);
    Fill(w2, rng, 0.1);
  }
  void Step(Optimizer& optimizer, uint64_t seed, double scale = 1.0) {
    std::mt19937_64 rng(seed);
    Fill(g1, rng, 2.0 * scale);
    Fill(g2, rng, 0.01 * scale);
    optimizer.Step({{w1.view(), g1.view()}, {w2.view(), g2.view()}}, kRate);
  }
  static std::vector<Vec> Tensors(const HostMatrix& one, const HostMatrix& other) {
    return {Columns(one, 0, 5), Columns(one, 5, 6), Columns(other, 0, 4), Columns(other, 4, 5)};
  }
};

class OptimizerTest : public ::testing::TestWithParam<std::string> {};

// f32 rounding of the updates: about as many half-ulps of weights of size 1, times a few operations a step.
TEST_P(OptimizerTest, FollowsTheFormula) {
  const std::string name = GetParam();
  // Scales of the gradients, whose norm is then beyond lamb's limit or below it.
  for (const double scale : {1.0, 0.01}) {
    Optimizer optimizer = Optimizer::Make(name).value();
    Model model;
    std::vector<Vec> want = Model::Tensors(model.w1, model.w2);
    std::vector<reference::SgdState> sgd(4);
    std::vector<reference::AdamState> adam(4);
    for (uint64_t step = 0; step < 40; ++step) {
      model.Step(optimizer, step, scale);
      const std::vector<Vec> g = Model::Tensors(model.g1, model.g2);
      Vec norms;
      for (const Vec& one : g) norms.push_back(reference::Norm(one));
      for (size_t t = 0; t < g.size(); ++t) {
        if (name == "adamw") {
          reference::AdamWStep(kRate, 0.9, 0.999, 1e-8, g[t], want[t], adam[t]);
        } else if (name == "lamb") {
          reference::LambStep(kRate, 0.9, 0.999, 1e-6, 1.0, reference::Norm(norms), g[t], want[t], adam[t]);
        } else {
          reference::SgdStep(kRate, name == "sgd" ? 0.9 : 0, g[t], want[t], sgd[t]);
        }
      }
    }
    const std::vector<Vec> have = Model::Tensors(model.w1, model.w2);
    for (size_t t = 0; t < have.size(); ++t) {
      for (size_t i = 0; i < have[t].size(); ++i) {
        EXPECT_NEAR(have[t][i], want[t][i], 2e-5 * (1 + std::abs(want[t][i])))
            << "scale " << scale << " tensor " << t << " element " << i;
      }
    }
  }
}

TEST_P(OptimizerTest, GoesOnBitwiseFromWhatWasSaved) {
  Optimizer first = Optimizer::Make(GetParam()).value(), second = first;
  Model one;
  for (uint64_t s = 0; s < 5; ++s) one.Step(first, s);
  const std::string saved = first.SaveState();
  EXPECT_FALSE(second.LoadState(saved.substr(0, saved.size() - 1)).ok());
  ASSERT_TRUE(second.LoadState(saved).ok());
  EXPECT_EQ(second.SaveState(), saved);
  Model other = one;
  for (uint64_t s = 5; s < 20; ++s) {
    one.Step(first, s);
    other.Step(second, s);
  }
  EXPECT_EQ(one.w1.data(), other.w1.data());
  EXPECT_EQ(one.w2.data(), other.w2.data());
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerTest, ::testing::Values("adamw", "lamb", "sgd", "plain"));

TEST(LambTest, ZeroWeightsMoveWithoutATrustRatio) {
  Optimizer optimizer = Optimizer::Make("lamb").value();
  HostMatrix w(1, 2), g(1, 2);
  g.data() = {0.3f, -0.1f};
  optimizer.Step({{w.view(), g.view()}}, 0.5);
  // The first Adam direction is the sign of the gradient.
  EXPECT_NEAR(w.data()[0], -0.5, 1e-4);
  EXPECT_NEAR(w.data()[1], 0.5, 1e-4);
}

}  // namespace
}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/mlp.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "kernels/base/random.h"

namespace precondor::digits {
namespace {

using Weights = std::vector<std::vector<double>>;  // row-major, as the model's

// Mean loss written from the formulas, in double.
double NaiveLoss(const MlpSpec& spec, const Weights& weights, const Examples& examples) {
  double loss = 0;
  for (int64_t n = 0; n < examples.size(); ++n) {
    const float* pixels = examples.pixels.view().row(n);
    std::vector<double> x(pixels, pixels + kPixels);
    for (size_t l = 0; l < weights.size(); ++l) {
      x.push_back(1.0);
      std::vector<double> y(static_cast<size_t>(spec.widths[l + 1]));
      for (size_t i = 0; i < y.size(); ++i) {
        for (size_t j = 0; j < x.size(); ++j) y[i] += weights[l][i * x.size() + j] * x[j];
        if (l + 1 < weights.size()) y[i] = std::tanh(y[i]);
      }
      x = y;
    }
    if (spec.objective == Objective::kReconstruct) {
      for (size_t j = 0; j < x.size(); ++j) loss += (x[j] - pixels[j]) * (x[j] - pixels[j]) / kPixels;
    } else {
      double sum = 0;
      for (const double logit : x) sum += std::exp(logit);
      loss += std::log(sum) - x[static_cast<size_t>(examples.labels[static_cast<size_t>(n)])];
    }
  }
  return loss / static_cast<double>(examples.size());
}

Examples RandomExamples(int64_t count) {
  Examples examples{HostMatrix(count, kPixels), std::vector<int32_t>(static_cast<size_t>(count))};
  const CounterRandom random({11, 1});
  uint64_t drawn = 0;
  for (float& pixel : examples.pixels.data()) pixel = static_cast<float>(random.Bits(drawn++) >> 40) * 0x1p-24f;
  for (int32_t& label : examples.labels) label = static_cast<int32_t>(random.Bits(drawn++) % kClasses);
  return examples;
}

Weights InDouble(const Mlp& model) {
  Weights weights;
  for (const HostMatrix& weight : model.weights()) weights.emplace_back(weight.data().begin(), weight.data().end());
  return weights;
}

class MlpTest : public ::testing::TestWithParam<Objective> {
 protected:
  MlpTest() : spec_{{64, 7, 5, GetParam() == Objective::kClassify ? kClasses : kPixels}, GetParam()} {}
  const MlpSpec spec_;
};

TEST_P(MlpTest, LossIsTheFormulas) {
  Mlp model(spec_, 3);
  const Examples examples = RandomExamples(6);
  const auto loss = model.Backward(examples, [](const LayerTap&) { return absl::OkStatus(); });
  ASSERT_TRUE(loss.ok());
  const double expected = NaiveLoss(spec_, InDouble(model), examples);
  EXPECT_NEAR(*loss, expected, 1e-5 * expected);
  EXPECT_NEAR(model.Evaluate(examples).loss, expected, 1e-5 * expected);
}

TEST_P(MlpTest, GradientsAreCentralDifferences) {
  Mlp model(spec_, 3);
  const Examples examples = RandomExamples(6);
  ASSERT_TRUE(model.Backward(examples, [](const LayerTap&) { return absl::OkStatus(); }).ok());
  Weights weights = InDouble(model);
  constexpr double kStep = 1e-5;
  for (size_t l = 0; l < weights.size(); ++l) {
    for (size_t i = 0; i < weights[l].size(); i += 3) {
      const double saved = weights[l][i];
      weights[l][i] = saved + kStep;
      const double above = NaiveLoss(spec_, weights, examples);
      weights[l][i] = saved - kStep;
      const double below = NaiveLoss(spec_, weights, examples);
      weights[l][i] = saved;
      // f32 arithmetic on sums of at most 65 terms of order one.
      EXPECT_NEAR(model.gradient(static_cast<int64_t>(l)).data[i], (above - below) / (2 * kStep), 2e-6)
          << "layer " << l << ", element " << i;
    }
  }
}

TEST_P(MlpTest, StopsAtTheFirstFailureOfAListener) {
  Mlp model(spec_, 3);
  int calls = 0;
  const auto loss = model.Backward(RandomExamples(2), [&](const LayerTap&) {
    ++calls;
    return absl::AbortedError("enough");
  });
  EXPECT_EQ(loss.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(calls, 1);
}

INSTANTIATE_TEST_SUITE_P(Objectives, MlpTest, ::testing::Values(Objective::kClassify, Objective::kReconstruct));

}  // namespace
}  // namespace precondor::digits

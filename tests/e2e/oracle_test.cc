// SPDX-License-Identifier: Apache-2.0
// Training in one process against the same training written a second time in double precision.
#include "tests/e2e/oracle.h"

#include <cmath>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "tests/e2e/in_process.h"
#include "tests/e2e/service_training.h"
#include "tests/e2e/trainer/digits_data.h"
#include "tests/e2e/trainer/host_matrix.h"
#include "tests/e2e/trainer/options.h"

namespace precondor::e2e {
namespace {

// Bounds are relative differences of all weights after kSteps. Rounding to f32 alone gives 5e-7 with SGD, which is
// smooth in its gradients; AdamW's first steps are close to sign(u), so that rounding is magnified where |u| is near
// epsilon.
constexpr int64_t kSteps = 60;

struct Case {
  const char* task;
  const char* method;
  const char* optimizer;
  int32_t workers;
  DType dtype;
  double bound;
};

class OracleTest : public ::testing::TestWithParam<Case> {};

double DifferenceToOracle(const Case& test) {
  const auto data = digits::LoadDigits(PRECONDOR_DIGITS_DATA);
  EXPECT_TRUE(data.ok()) << data.status();
  digits::Run run = RunOfRow(test.method, test.task, kSteps);
  run.optimizer = test.optimizer;
  run.session.world_size = test.workers;
  run.session.statistics_dtype = test.dtype;
  run.learning_rate = run.optimizer == "sgd" ? 0.1 : 0.016;
  const auto trained = TrainInProcess(run, *data);
  EXPECT_TRUE(trained.ok()) << trained.status();
  const std::vector<std::vector<double>> expected = TrainOracle(run, *data);
  double difference = 0;
  double norm = 0;
  for (size_t l = 0; l < expected.size(); ++l) {
    for (size_t i = 0; i < expected[l].size(); ++i) {
      difference += std::pow(trained->weights()[l].data()[i] - expected[l][i], 2);
      norm += std::pow(expected[l][i], 2);
    }
  }
  return std::sqrt(difference / norm);
}

TEST_P(OracleTest, TrainingFollowsTheFormulas) {
  const double difference = DifferenceToOracle(GetParam());
  RecordProperty("relative_difference", std::to_string(difference));
  EXPECT_LE(difference, GetParam().bound);
}

INSTANTIATE_TEST_SUITE_P(
    Dense, OracleTest,
    ::testing::Values(Case{"autoencoder", "none", "adamw", 1, DType::kF32, 2e-6},
                      Case{"classifier", "none", "sgd", 4, DType::kF32, 2e-6},
                      Case{"autoencoder", "mean", "adamw", 4, DType::kF32, 5e-5},
                      Case{"classifier", "mean", "sgd", 7, DType::kF32, 5e-6},
                      Case{"autoencoder", "signed", "sgd", 4, DType::kF32, 5e-6},
                      Case{"autoencoder", "signed", "sgd", 7, DType::kF32, 5e-6},
                      Case{"classifier", "signed", "sgd", 1, DType::kF32, 5e-6},
                      // f16 rounds every element of a statistic vector by up to 2^-11 = 5e-4 of itself.
                      Case{"autoencoder", "signed", "sgd", 4, DType::kF16, 5e-4},
                      Case{"classifier", "signed", "sgd", 7, DType::kF16, 5e-4}));

// Rank 16 drops columns as soon as more than 16 vectors have come; their mass goes to the damping. The trajectory is
// then that of slightly different factors: about 1 % (autoencoder) and 3 % (classifier) of the weights.
INSTANTIATE_TEST_SUITE_P(LowRank, OracleTest,
                         ::testing::Values(Case{"autoencoder", "signed-lowrank", "sgd", 4, DType::kF32, 0.03},
                                           Case{"classifier", "signed-lowrank", "sgd", 7, DType::kF32, 0.06},
                                           // One vector a step: the first 16 fit, older ones have decayed.
                                           Case{"autoencoder", "mean-lowrank", "sgd", 4, DType::kF32, 5e-5}));

}  // namespace
}  // namespace precondor::e2e

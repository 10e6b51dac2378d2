// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/results.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace precondor::digits {
namespace {

using nlohmann::json;

Run SomeRun() {
  Run run;
  run.task = *FindTask("classifier");
  run.task.steps = 2;
  run.learning_rate = 0.016;
  return run;
}

RankResult SomeRank(double seconds) {
  RankResult rank;
  rank.trained.curve = {{1, 0.1, 0.9, std::numeric_limits<double>::quiet_NaN()}, {2, 1.0 / 3, 0.95, 0.25}};
  rank.trained.weights = {HostMatrix(1, 2)};
  rank.trained.seconds = seconds;
  rank.log = {0, {Mode::kSecondOrder, Mode::kFirstOrder}, {0, 0.5, seconds}, {0, 8, 8}, {0, 100, 5000000000}};
  return rank;
}

TEST(ResultsTest, JsonHasTheSumsOverTheWorkers) {
  const json value = json::parse(ResultJson(SomeRun(), {SomeRank(1), SomeRank(2)}));
  EXPECT_EQ(value["task"], "classifier");
  EXPECT_EQ(value["method"], "mkor");
  EXPECT_EQ(value["base_optimizer"], "adamw");
  EXPECT_EQ(value["exchange"], "DIRECT");
  EXPECT_EQ(value["learning_rate"], 0.016);
  EXPECT_EQ(value["final_loss"], 1.0 / 3);
  EXPECT_EQ(value["final_accuracy"], 0.95);
  EXPECT_EQ(value["final_training_loss"], 0.25);
  EXPECT_EQ(value["curve"], json({{1, 0.1, 0.9, nullptr}, {2, 1.0 / 3, 0.95, 0.25}}));
  EXPECT_EQ(value["modes"], json({"SECOND_ORDER", "FIRST_ORDER"}));
  EXPECT_EQ(value["step_seconds"], json({0, 0.5, 2}));
  EXPECT_EQ(value["statistics_bytes"], json({0, 16, 16}));
  EXPECT_EQ(value["gradient_bytes"], json({0, 200, 10000000000}));
  EXPECT_EQ(value["weights_hash"].get<std::string>().size(), 16u);
}

TEST(ResultsTest, ReplicasAreEqualBitForBit) {
  EXPECT_TRUE(CheckReplicas({SomeRank(1), SomeRank(2)}).ok());
  RankResult weights = SomeRank(1);
  weights.trained.weights[0].data()[1] = -0.0f;
  EXPECT_THAT(std::string(CheckReplicas({SomeRank(1), weights}).message()), ::testing::HasSubstr("final weights"));
  RankResult modes = SomeRank(1);
  modes.log.modes[1] = Mode::kSecondOrder;
  EXPECT_THAT(std::string(CheckReplicas({SomeRank(1), modes}).message()), ::testing::HasSubstr("modes"));
}

}  // namespace
}  // namespace precondor::digits

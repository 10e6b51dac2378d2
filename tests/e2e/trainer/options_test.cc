// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

namespace precondor::digits {
namespace {

absl::StatusOr<Options> Parse(const std::vector<std::string>& arguments) { return ParseOptions(arguments, "data.csv"); }

TEST(OptionsTest, DefaultsToTheMethodOnTheAutoencoder) {
  const auto options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->run.task, "autoencoder");
  EXPECT_EQ(options->run.steps, 600);
  EXPECT_EQ(options->run.session.method.name, "mkor");
  EXPECT_EQ(options->run.session.world_size, 4);
  EXPECT_EQ(options->run.session.layers.size(), 6u);
  EXPECT_EQ(options->data_path, "data.csv");
}

TEST(OptionsTest, TakesValuesInBothForms) {
  const auto options = Parse({"--steps=9", "--task=classifier", "--workers", "7", "--exchange", "delegate",
                              "--method=kfac", "--option=pi_split=true", "--option", "damping=piecewise(0, 1: 2)",
                              "--option=gamma=0.5", "--option=rank=16", "--statistics=covariance", "--optimizer=lamb",
                              "--learning-rate=0.01", "--fallback=at-step:12"});
  ASSERT_TRUE(options.ok()) << options.status();
  const SessionSpec& spec = options->run.session;
  EXPECT_EQ(options->run.steps, 9);
  EXPECT_EQ(options->run.task, "classifier");
  EXPECT_EQ(spec.layers.size(), 3u);
  EXPECT_EQ(spec.world_size, 7);
  EXPECT_EQ(spec.exchange, ExchangeMode::kDelegate);
  EXPECT_EQ(spec.statistics, StatisticsKind::kCovariance);
  EXPECT_EQ(spec.fallback.at_step, 12u);
  EXPECT_EQ(spec.method.name, "kfac");
  EXPECT_EQ(spec.method.options.at("pi_split"), OptionValue(true));
  EXPECT_EQ(spec.method.options.at("damping"), OptionValue(std::string("piecewise(0, 1: 2)")));
  EXPECT_EQ(spec.method.options.at("gamma"), OptionValue(0.5));
  EXPECT_EQ(spec.method.options.at("rank"), OptionValue(16.0));
  EXPECT_EQ(options->run.optimizer, "lamb");
  EXPECT_EQ(options->run.learning_rate, 0.01);
}

TEST(OptionsTest, SaysWhatIsWrong) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--workers=0"}, "--workers: expected 1 ... 128, got \"0\""},
      {{"--workers"}, "--workers: expected a value"},
      {{"--task=chess"}, "--task: expected autoencoder or classifier, got \"chess\""},
      {{"--option=rank"}, "--option: expected NAME=VALUE, got \"rank\""},
      {{"--optimizer=magic"}, "--optimizer: expected adamw, lamb, sgd or plain, got \"magic\""},
      {{"--exchange=ring"}, "expected direct, delegate, replay or pull_factors, got \"ring\""},
      {{"--learning-rate=nan"}, "--learning-rate: expected RATE, got \"nan\""},
      {{"--fallback=at-step:-1"}, "at-step:N, got \"at-step:-1\""},
      {{"extra"}, "unknown flag extra"},
      {{"--extra=1"}, "unknown flag --extra"},
  };
  for (const auto& [arguments, expected] : cases) {
    const auto options = Parse(arguments);
    EXPECT_EQ(options.ok(), false) << expected;
    EXPECT_THAT(std::string(options.status().message()), ::testing::HasSubstr(expected));
  }
}

TEST(OptionsTest, AllFallbackPoliciesAreValid) {
  for (const char* name : {"never", "loss-rate", "at-step:0"}) {
    const auto options = Parse({"--fallback", name});
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_TRUE(ValidateFallbackConfig(options->run.session.fallback).ok()) << name;
  }
}

}  // namespace
}  // namespace precondor::digits

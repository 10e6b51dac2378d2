// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

namespace precondor::digits {
namespace {

absl::StatusOr<Options> Parse(const std::vector<const char*>& arguments) { return ParseOptions(arguments, "data.csv"); }

TEST(OptionsTest, DefaultsToEverything) {
  const auto options = Parse({"--in-process"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->tasks.size(), AllTasks().size());
  EXPECT_EQ(options->methods.size(), AllMethods().size() - 1) << "all but mkor-h, which takes a coordinator";
  EXPECT_EQ(Parse({"--coordinator=h:1"})->methods.size(), AllMethods().size());
  EXPECT_EQ(options->workers, 4);
  EXPECT_EQ(options->seeds, 5);
  EXPECT_EQ(options->data_path, "data.csv");
}

TEST(OptionsTest, TakesValuesInBothForms) {
  const auto options =
      Parse({"--coordinator=localhost:1", "--workers", "7", "--exchange", "delegate", "--tasks=classifier", "--methods",
             "none,signed-lowrank", "--optimizers=sgd,lamb", "--learning-rates=0.01", "--on-shard-loss=degrade"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->coordinator, "localhost:1");
  EXPECT_EQ(options->workers, 7);
  EXPECT_EQ(options->exchange, ExchangeMode::kDelegate);
  EXPECT_EQ(options->on_shard_loss, ShardLossPolicy::kDegrade);
  ASSERT_EQ(options->tasks.size(), 1u);
  EXPECT_EQ(options->tasks[0].name, "classifier");
  ASSERT_EQ(options->methods.size(), 2u);
  EXPECT_EQ(options->methods[1].representation, "low_rank");
  EXPECT_EQ(options->optimizers, (std::vector<std::string>{"sgd", "lamb"}));
  EXPECT_EQ(options->learning_rates, std::vector<double>{0.01});
}

TEST(OptionsTest, FlagsAfterShortChangeIt) {
  const auto options = Parse({"--in-process", "--short", "--seeds=3"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->methods.size(), 3u);
  EXPECT_EQ(options->seeds, 3);
}

TEST(OptionsTest, FallbackIsOfEveryMethodThatPreconditions) {
  const auto own = Parse({"--coordinator=h:1", "--methods=none,signed,mkor-h"});
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(own->methods[1].fallback, "never");
  EXPECT_EQ(own->methods[2].fallback, "loss-rate");
  // Wherever it stands.
  for (const auto& options :
       {Parse({"--coordinator=h:1", "--fallback=at-step:9", "--methods=none,signed,mkor-h"}),
        Parse({"--coordinator=h:1", "--methods=none,signed,mkor-h", "--fallback", "at-step:9"})}) {
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->methods[0].fallback, "never");
    EXPECT_EQ(options->methods[1].fallback, "at-step:9");
    EXPECT_EQ(options->methods[2].fallback, "at-step:9");
    digits::Run run;
    run.task = options->tasks[0];
    run.method = options->methods[1];
    EXPECT_EQ(MakeSessionSpec(run, "s").fallback.at_step, 9u);
  }
  for (const char* name : {"never", "loss-rate", "cost-aware", "at-step:0"}) {
    const auto config = FindFallback(name);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_TRUE(ValidateFallbackConfig(*config).ok()) << name;
  }
}

TEST(OptionsTest, SaysWhatIsWrong) {
  const std::vector<std::pair<std::vector<const char*>, std::string>> cases = {
      {{}, "either --coordinator HOST:PORT or --in-process"},
      {{"--in-process", "--coordinator=h:1"}, "either --coordinator"},
      {{"--coordinator=h:1", "--worker-restarts=2"}, "--worker-restarts needs --checkpoint-dir"},
      {{"--coordinator=h:1", "--checkpoint-dir=d"}, "--worker-restarts needs --checkpoint-dir"},
      {{"--coordinator=h:1", "--worker-restarts=2", "--checkpoint-dir=d", "--exchange=delegate"}, "--exchange=direct"},
      {{"--coordinator=h:1", "--on-shard-loss=degrade"}, "--on-shard-loss=degrade: expected --exchange=delegate"},
      {{"--in-process", "--workers=0"}, "--workers: expected a number 1 ... 128, got \"0\""},
      {{"--in-process", "--workers=many"}, "got \"many\""},
      {{"--in-process", "--workers"}, "--workers needs a value"},
      {{"--in-process", "--tasks=chess"}, "no task \"chess\"; there are classifier, autoencoder"},
      {{"--in-process", "--methods=magic"}, "no method \"magic\"; there are none, reference"},
      {{"--in-process", "--optimizers=magic"}, "no optimizer \"magic\""},
      {{"--in-process", "--exchange=ring"}, "expected direct, delegate, replay or pull_factors, got \"ring\""},
      {{"--in-process", "--on-shard-loss=pray"}, "--on-shard-loss: expected wait or degrade, got \"pray\""},
      {{"--in-process", "--learning-rates=0.1,0.05"}, "expected positive rates, ascending"},
      {{"--in-process", "--fallback=soon"}, "--fallback: no fallback \"soon\"; there are never, loss-rate"},
      {{"--in-process", "--fallback=at-step:-1"}, "no fallback \"at-step:-1\""},
      {{"--in-process", "--fallback=loss-rate"}, "that takes a coordinator, not --in-process"},
      {{"--in-process", "--methods=mkor-h"}, "mkor-h falls back (loss-rate): that takes a coordinator"},
      {{"--in-process", "--learning-rates=nan"}, "expected positive rates"},
      {{"--in-process", "extra"}, "unknown argument extra"},
      {{"--in-process", "--extra=1"}, "unknown argument --extra=1"},
  };
  for (const auto& [arguments, expected] : cases) {
    const auto options = Parse(arguments);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument) << expected;
    EXPECT_THAT(std::string(options.status().message()), ::testing::HasSubstr(expected));
  }
}

TEST(OptionsTest, HelpNamesEveryTaskAndMethod) {
  for (const Task& task : AllTasks()) EXPECT_THAT(HelpText(), ::testing::HasSubstr(task.name));
  for (const MethodVariant& method : AllMethods()) EXPECT_THAT(HelpText(), ::testing::HasSubstr(method.name));
}

TEST(OptionsTest, MethodsWithAMomentumOfTheirOwnRunOnPlainSgd) {
  for (const char* name : {"kron", "soap", "muon"}) EXPECT_EQ(FindMethod(name)->optimizer, "plain") << name;
  EXPECT_EQ(FindMethod("signed-lowrank")->optimizer, "");
  const OptimizerConfig plain = FindOptimizer("plain").value();
  EXPECT_EQ(plain.name, "sgd");
  EXPECT_EQ(plain.momentum, 0);
}

}  // namespace
}  // namespace precondor::digits

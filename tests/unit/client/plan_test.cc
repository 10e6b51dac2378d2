// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/plan.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_commands.h"
#include "client/cpp/tools/plan_command.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGib = int64_t{1} << 30;

// Four layers of two shapes; 3 workers, one sketch each, statistics every 4 steps.
PlanInput Input(ExchangeMode exchange, const std::string& representation = "DENSE") {
  PlanInput input;
  input.network_gbps = 8;  // 1e9 bytes a second
  input.shard_memory_bytes = 4 * kGib;
  input.spec.name = "plan";
  input.spec.world_size = 3;
  input.spec.exchange = exchange;
  input.spec.sketches = 1;
  input.spec.inv_freq = 4;
  input.spec.method.options["representation"] = representation;
  input.spec.method.options["rank"] = 16.0;
  for (int i = 0; i < 4; ++i) {
    input.spec.layers.push_back({absl::StrCat("layer", i), i % 2 == 0 ? 100 : 300, 200, false});
  }
  return input;
}

Plan MustPlan(const PlanInput& input) {
  const auto plan = MakePlan(input);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : Plan();
}

// By hand: two layers [100, 200] and two [300, 200].
constexpr int64_t kParameters = int64_t{2} * (100 * 200 + 300 * 200);
constexpr int64_t kVectors =
    int64_t{2} * (100 + 200 + 300 + 200);  // elements of one vector for each side of each layer

TEST(PlanTest, CountsBytesOfAWorkerAndOfAShard) {
  const Plan direct = MustPlan(Input(ExchangeMode::kDirect));
  EXPECT_EQ(direct.parameters, kParameters);
  EXPECT_EQ(direct.worker.gradients_sent, kParameters * 4);
  EXPECT_EQ(direct.worker.answers_received, kParameters * 4);
  EXPECT_EQ(direct.worker.statistics_sent, kVectors * 2);
  EXPECT_EQ(direct.worker.factors_received, 0);
  EXPECT_DOUBLE_EQ(direct.worker_sent, kParameters * 4 + kVectors * 2 / 4.0);
  EXPECT_DOUBLE_EQ(direct.worker_received, kParameters * 4);
  ASSERT_EQ(direct.shards.size(), 1u);
  EXPECT_DOUBLE_EQ(direct.shards[0].received, 3 * (kParameters * 4 + kVectors * 2 / 4.0));
  EXPECT_DOUBLE_EQ(direct.shards[0].sent, 3 * kParameters * 4);
  EXPECT_TRUE(direct.network_at_shard);
  EXPECT_DOUBLE_EQ(direct.network_seconds, direct.shards[0].received / 1e9);

  // Rank 0 sends layers 0 and 3, of the two shapes; ranks 1 and 2 one layer each.
  const Plan delegate = MustPlan(Input(ExchangeMode::kDelegate));
  EXPECT_EQ(delegate.worker.gradients_sent, (100 * 200 + 300 * 200) * 4);
  EXPECT_DOUBLE_EQ(delegate.shards[0].received, kParameters * 4 + 3 * kVectors * 2 / 4.0);
  EXPECT_DOUBLE_EQ(delegate.shards[0].sent, kParameters * 4);

  // The vectors of 3 workers come back in f32.
  const Plan replay = MustPlan(Input(ExchangeMode::kReplay));
  EXPECT_EQ(replay.worker.gradients_sent, 0);
  EXPECT_EQ(replay.worker.factors_received, 3 * kVectors * 4);
  EXPECT_DOUBLE_EQ(replay.worker_received, 3 * kVectors * 4 / 4.0);
  EXPECT_DOUBLE_EQ(replay.shards[0].sent, 9 * kVectors * 4 / 4.0);
}

TEST(PlanTest, CountsOperations) {
  PlanInput input = Input(ExchangeMode::kDirect);
  input.device_tflops = 1;
  // 2 m n (m + n) and, for 3 vectors, 2 k (m^2 + n^2).
  const double dense = 2.0 * (2.0 * 100 * 200 * (100 + 200) + 2.0 * 300 * 200 * (300 + 200));
  const double update = 2.0 * (2.0 * 3 * (100 * 100 + 200 * 200) + 2.0 * 3 * (300 * 300 + 200 * 200));
  const Plan plan = MustPlan(input);
  EXPECT_DOUBLE_EQ(plan.precondition_flops, dense);
  EXPECT_DOUBLE_EQ(plan.update_flops, update);
  EXPECT_NEAR(plan.shard_seconds, (dense + update / 4) / 1e12, 1e-15);
  EXPECT_EQ(plan.worker_seconds, 0);

  // 8 r m n and 2 r k (m + n).
  PlanInput low_rank = Input(ExchangeMode::kReplay, "LOW_RANK");
  low_rank.device_tflops = 1;
  const Plan replayed = MustPlan(low_rank);
  EXPECT_DOUBLE_EQ(replayed.precondition_flops, 8.0 * 16 * kParameters);
  EXPECT_DOUBLE_EQ(replayed.update_flops, 2.0 * 16 * 3 * kVectors);
  EXPECT_NEAR(replayed.shard_seconds, replayed.update_flops / 4 / 1e12, 1e-15);
  EXPECT_NEAR(replayed.worker_seconds, (replayed.precondition_flops + replayed.update_flops / 4) / 1e12, 1e-15);
}

TEST(PlanTest, PlacesLayersEvenlyAndAsManyShardsAsMemoryNeeds) {
  PlanInput input = Input(ExchangeMode::kDirect);
  input.shards = 2;
  const Plan even = MustPlan(input);
  ASSERT_EQ(even.shards.size(), 2u);
  EXPECT_EQ(even.shards[0].layers, 2);
  EXPECT_DOUBLE_EQ(even.imbalance, 1);
  EXPECT_EQ(even.shards_by_memory, 1);
  input.shards = 3;  // a large layer each, and the small ones together
  const Plan uneven = MustPlan(input);
  const double large = 2.0 * 300 * 200 * 500 + 2.0 * 3 * (300 * 300 + 200 * 200);
  const double small = 2.0 * 100 * 200 * 300 + 2.0 * 3 * (100 * 100 + 200 * 200);
  EXPECT_NEAR(uneven.imbalance, large / ((2 * large + 2 * small) / 3), 1e-12);

  // Half of what one shard needs takes at least two.
  const int64_t needed = even.shards[0].reserved() + even.shards[1].reserved();
  input.shards = 0;
  input.shard_memory_bytes = needed / 2 + 1;
  const Plan two = MustPlan(input);
  EXPECT_EQ(two.shards_by_memory, 2);
  EXPECT_TRUE(two.fits);
  input.shards = 1;
  const Plan tight = MustPlan(input);
  EXPECT_FALSE(tight.fits);
  EXPECT_THAT(tight.reason, HasSubstr(absl::StrCat(input.shard_memory_bytes)));
  EXPECT_EQ(tight.shards[0].layers, 4);  // what it would need
  EXPECT_GT(tight.shards[0].reserved(), input.shard_memory_bytes);
  input.shard_memory_bytes = 1000;
  const Plan none = MustPlan(input);
  EXPECT_FALSE(none.fits);
  EXPECT_EQ(none.shards_by_memory, 0);
  EXPECT_THAT(none.reason, HasSubstr("layer 0 \"layer0\" needs "));
}

TEST(PlanCommandTest, SaysWhetherTheSessionFits) {
  for (const bool fits : {true, false}) {
    const auto options = ParseCtlOptions(
        {"plan", "--preset=bert-large", "--shards=1", absl::StrCat("--shard-memory-gib=", fits ? "64" : "1")});
    ASSERT_TRUE(options.ok()) << options.status();
    const auto output = RunCtlCommand(*options);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(output->ok, fits) << output->text;
  }
}

TEST(PlanOptionsTest, ReadsFlags) {
  const auto options = ParseCtlOptions({"plan", "--preset=bert-large", "--workers", "64", "--exchange=DELEGATE",
                                        "--option=rank=128", "--option=representation=LOW_RANK", "--option=rule=BLEND",
                                        "--option=gamma=0.5", "--network-gbps=25", "--shard-memory-gib=0.5",
                                        "--shards=3", "--gradient-dtype=bf16", "--statistics=MEAN", "--json"});
  ASSERT_TRUE(options.ok()) << options.status();
  const PlanInput& input = options->plan.input;
  EXPECT_EQ(options->plan.preset, "bert-large");
  EXPECT_EQ(input.spec.world_size, 64);
  EXPECT_EQ(input.spec.exchange, ExchangeMode::kDelegate);
  EXPECT_EQ(input.spec.statistics, StatisticsKind::kMean);
  EXPECT_EQ(input.spec.gradient_dtype, DType::kBF16);
  const std::map<std::string, OptionValue> expected = {
      {"rank", 128.0}, {"representation", std::string("LOW_RANK")}, {"rule", std::string("BLEND")}, {"gamma", 0.5}};
  EXPECT_EQ(input.spec.method.options, expected);
  EXPECT_EQ(input.network_gbps, 25);
  EXPECT_EQ(input.shard_memory_bytes, kGib / 2);
  EXPECT_EQ(input.shards, 3);
  EXPECT_TRUE(options->json);
}

TEST(PlanOptionsTest, SaysWhatIsWrong) {
  const auto message = [](const std::vector<std::string>& arguments) {
    const auto options = ParseCtlOptions(arguments);
    EXPECT_FALSE(options.ok());
    return std::string(options.status().message());
  };
  EXPECT_THAT(message({"plan"}), HasSubstr("expected one of --preset (resnet50, bert-large"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--layers=f"}), HasSubstr("expected one of"));
  EXPECT_THAT(message({"plan", "--preset=vgg"}), HasSubstr("--preset: expected one of resnet50"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--workers=0"}),
              HasSubstr("--workers: expected an integer, 1 ... 65536, got \"0\""));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--exchange=all"}),
              HasSubstr("--exchange: expected DIRECT, DELEGATE, SHARDED, REPLAY or PULL_FACTORS, got \"all\""));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--network-gbps=fast"}),
              HasSubstr("--network-gbps: expected a number"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--method=adam"}), HasSubstr("--method: expected mkor"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--method=eva", "--option=rank=4"}),
              HasSubstr("--option: expected an option of method eva, got \"rank\""));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--option=colour=red"}),
              HasSubstr("--option: expected an option of method mkor, got \"colour\""));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--option=rank"}), HasSubstr("--option: expected NAME=VALUE"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--option=rank=many"}), HasSubstr("rank"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--gradient-dtype=f64"}), HasSubstr("expected f32, f16 or bf16"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--statistics=COVARIANCE"}),
              HasSubstr("statistics: expected vectors for method mkor, got COVARIANCE"));
  EXPECT_THAT(message({"plan", "--preset=bert-large", "--exchange=REPLAY", "--method=kron"}),
              HasSubstr("method: expected one of mkor, identity, eva with exchange REPLAY, got kron"));
  EXPECT_THAT(message({"status", "--preset=bert-large"}), HasSubstr("--preset: for the command plan only"));
}

TEST(PlanReportTest, WritesTablesAndJson) {
  ModelShapes model{.name = "small", .layers = {}, .left_out = "heads"};
  PlanInput input = Input(ExchangeMode::kDirect);
  input.device_tflops = 1;
  const Plan plan = MustPlan(input);
  const std::string table = PlanTable(model, input, plan);
  EXPECT_THAT(table, HasSubstr("left to the optimizer: heads"));
  EXPECT_THAT(table, HasSubstr("the session fits"));
  EXPECT_THAT(table, HasSubstr("a step at 1 TFLOP/s"));
  const nlohmann::json document = PlanJson(model, input, plan);
  EXPECT_EQ(document["parameters"], kParameters);
  EXPECT_EQ(document["shards"].size(), 1u);
  EXPECT_EQ(document["fits"], true);
  EXPECT_EQ(document["network_at"], "shard");
  input.shard_memory_bytes = 1000;
  EXPECT_THAT(PlanTable(model, input, MustPlan(input)), HasSubstr("does not fit: layer 0"));
}

}  // namespace
}  // namespace precondor

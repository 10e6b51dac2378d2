// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/perf_training.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

TEST(PerfOptionsTest, ReadsFlags) {
  const auto options =
      ParsePerfOptions({"--workload=plan", "--server=a:1", "--workers=3", "--preset=bert-large", "--json=x=y"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->workload, "plan");
  EXPECT_EQ(options->server, "a:1");
  EXPECT_EQ(options->workers, 3);
  EXPECT_TRUE(options->sweep.empty());
  EXPECT_EQ(ParsePerfOptions({"--workload=training", "--server=a:1", "--preset=bert-large", "--workers=1,2,16"})->sweep,
            (std::vector<int64_t>{1, 2, 16}));
  EXPECT_EQ(options->json, "x=y");
  const auto training = ParsePerfOptions({"--workload=training", "--server=a:1", "--preset=resnet50", "--workers=2",
                                          "--exchange=REPLAY", "--method=eva", "--seconds=9"});
  ASSERT_TRUE(training.ok()) << training.status();
  EXPECT_EQ(training->sweep, std::vector<int64_t>{2});
  EXPECT_EQ(training->exchange, ExchangeMode::kReplay);
  EXPECT_EQ(training->method, "eva");
  EXPECT_EQ(training->seconds, 9);
  EXPECT_EQ(ParsePerfOptions({"--help"})->workload, "help");
  EXPECT_EQ(PerfLayers(*options)->size(), 144u);
  EXPECT_EQ(PerfLayers(*options)->front(), (LayerSpec{"block0.query", 1024, 1024, false}));
  const auto scaled = ParsePerfOptions(
      {"--workload=training", "--server=a:1", "--preset=bert-large", "--scale=16", "--json=rows.json"});
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  EXPECT_EQ(scaled->json, "rows.json");
  EXPECT_EQ(PerfLayers(*scaled)->back(), (LayerSpec{"block23.down", 64, 256, false}));
  EXPECT_TRUE(PerfLayers(*ParsePerfOptions({"--workload=gradients", "--server=a:1"}))->empty());
}

TEST(PerfOptionsTest, SaysWhatIsWrong) {
  const auto message = [](const std::vector<std::string>& arguments) {
    return std::string(ParsePerfOptions(arguments).status().message());
  };
  EXPECT_THAT(message({"training"}), HasSubstr("unknown flag training"));
  EXPECT_THAT(message({"--workload"}), HasSubstr("--workload: expected a value"));
  EXPECT_THAT(message({"--speed=1"}), HasSubstr("unknown flag --speed"));
  EXPECT_THAT(message({"--workers=0"}), HasSubstr("--workers: expected 1 ... 100000, got \"0\""));
  EXPECT_THAT(message({"--workers=1,,2"}), HasSubstr("--workers: expected 1 ... 100000, got \"1,,2\""));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--workers=1,2"}),
              HasSubstr("--workers: several numbers are for the workload training only"));
  EXPECT_THAT(message({"--workload=other", "--server=a:1"}), HasSubstr("got \"other\""));
  EXPECT_THAT(message({"--workload=gradients"}), HasSubstr("one of --server-binary and --server"));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--server-binary=b"}), HasSubstr("one of"));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--data-dir=d"}), HasSubstr("needs --server-binary"));
  const auto training = [&](const std::string& flag) {
    return message({"--workload=training", "--server=a:1", "--preset=bert-large", flag});
  };
  EXPECT_THAT(training("--exchange=SHARDED"),
              HasSubstr("--exchange: expected DIRECT, DELEGATE, REPLAY or PULL_FACTORS"));
  EXPECT_THAT(training("--seconds=0"), HasSubstr("--seconds: expected 1"));
  EXPECT_THAT(message({"--workload=plan", "--server=a:1", "--preset=bert-large", "--exchange=REPLAY"}),
              HasSubstr("--exchange: for the workload training only"));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--method=soap"}),
              HasSubstr("--method: for the workload training only"));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--seconds=3"}),
              HasSubstr("--seconds: for the workload training only"));
  EXPECT_THAT(message({"--workload=plan", "--server=a:1"}),
              HasSubstr("--workload=plan: expected --preset or --layers"));
  EXPECT_THAT(message({"--workload=training", "--server=a:1", "--preset=gpt2-xl", "--layers=f"}),
              HasSubstr("one of --preset and --layers"));
  EXPECT_THAT(message({"--workload=training", "--server=a:1", "--preset=vgg"}), HasSubstr("--preset: expected one"));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--scale=2"}), HasSubstr("--scale: expected --preset"));
}

TEST(PerfRowsTest, PercentilesAreSamples) {
  std::vector<double> samples;
  for (int i = 100; i >= 1; --i) samples.push_back(i);
  EXPECT_EQ(Percentile(samples, 0.5), 50);
  EXPECT_EQ(Percentile(samples, 0.99), 99);
  EXPECT_EQ(Percentile(samples, 1.0), 100);
  EXPECT_EQ(Percentile({7.0}, 0.5), 7);
}

TEST(PerfRowsTest, WritesTablesAndJson) {
  const std::vector<PerfRow> rows = {{"a", 1.5, "ms"}, {"b", 30, "ms", 40.0, 0.75, 20.0, false}};
  EXPECT_EQ(RowsTable(rows),
            "NAME  VALUE  UNIT  LIMIT  RATIO  TARGET  PASS\n"
            "a       1.5  ms        -      -       -  yes\n"
            "b        30  ms       40   0.75      20  NO\n");
  const nlohmann::json document = nlohmann::json::parse(RowsJson(rows));
  EXPECT_TRUE(document["rows"][0]["limit"].is_null());
  EXPECT_EQ(document["rows"][1]["target"], 20.0);
  EXPECT_EQ(document["rows"][1]["pass"], false);
}

TEST(PerfSweepTest, IsSteadyOnceThreeWindowsAreWithinTenPercent) {
  SteadyWindows windows;
  for (const double seconds : {1.0, 1.0}) windows.Add(seconds);
  EXPECT_FALSE(windows.done());
  windows.Add(1.2);
  EXPECT_FALSE(windows.done());
  EXPECT_NEAR(windows.spread(), 0.2, 1e-12);
  for (const double seconds : {1.25, 1.3}) windows.Add(seconds);
  EXPECT_TRUE(windows.steady());
  EXPECT_EQ(windows.count(), 5u);
}

TEST(PerfSweepTest, GivesUpAfterTheMostWindows) {
  SteadyWindows windows;
  for (double seconds = 1; !windows.done(); seconds *= 2) windows.Add(seconds);
  EXPECT_EQ(windows.count(), SteadyWindows::kMost);
  EXPECT_FALSE(windows.steady());
}

TEST(PerfSweepTest, WritesTablesAndJson) {
  const std::vector<SweepRow> rows = {{1, 2.5, 3.5, 400, 12, 3, 0.05, true}, {8, 20, 30, 50, 12, 9, 0.25, false}};
  const std::string table = SweepTable(rows);
  EXPECT_THAT(table, HasSubstr("WORKERS  STEP_P50_MS"));
  EXPECT_THAT(table, HasSubstr("     5.0  yes\n"));
  EXPECT_THAT(table, HasSubstr("8 workers: not steady: the last 3 of 9 windows differ by 25.0%, more than 10%\n"));
  const nlohmann::json document = nlohmann::json::parse(SweepJson(rows));
  EXPECT_EQ(document["sweep"][1]["workers"], 8);
  EXPECT_EQ(document["sweep"][1]["steady"], false);
}

}  // namespace
}  // namespace precondor

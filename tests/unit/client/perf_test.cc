// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

TEST(PerfOptionsTest, ReadsFlags) {
  const auto options = ParsePerfOptions({"--workload=bert-large", "--server=a:1", "--workers=3", "--json=x=y"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->workload, "bert-large");
  EXPECT_EQ(options->server, "a:1");
  EXPECT_EQ(options->workers, 3);
  EXPECT_EQ(options->json, "x=y");
  EXPECT_EQ(ParsePerfOptions({"--help"})->workload, "help");
  EXPECT_EQ(PerfLayers(*options)->size(), 144u);
  EXPECT_EQ(PerfLayers(*options)->front(), (LayerSpec{"block0.query", 1024, 1024, false}));
  const auto scaled = ParsePerfOptions(
      {"--workload=statistics", "--server=a:1", "--preset=bert-large", "--scale=16", "--csv=rows.csv"});
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  EXPECT_EQ(scaled->csv, "rows.csv");
  EXPECT_EQ(PerfLayers(*scaled)->back(), (LayerSpec{"block23.down", 64, 256, false}));
  EXPECT_TRUE(PerfLayers(*ParsePerfOptions({"--workload=gradients", "--server=a:1"}))->empty());
}

TEST(PerfOptionsTest, SaysWhatIsWrong) {
  const auto message = [](const std::vector<std::string>& arguments) {
    return std::string(ParsePerfOptions(arguments).status().message());
  };
  EXPECT_THAT(message({"bert-large"}), HasSubstr("expected --name=value"));
  EXPECT_THAT(message({"--workload"}), HasSubstr("expected --name=value"));
  EXPECT_THAT(message({"--speed=1"}), HasSubstr("unknown flag --speed"));
  EXPECT_THAT(message({"--workers=0"}), HasSubstr("--workers: expected 1 ... 100000, got \"0\""));
  EXPECT_THAT(message({"--workload=other", "--server=a:1"}), HasSubstr("got \"other\""));
  EXPECT_THAT(message({"--workload=gradients"}), HasSubstr("one of --server-binary and --server"));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--server-binary=b"}), HasSubstr("one of"));
  EXPECT_THAT(message({"--workload=gradients", "--server=a:1", "--data-dir=d"}), HasSubstr("needs --server-binary"));
  EXPECT_THAT(message({"--workload=statistics", "--server=a:1"}), HasSubstr("expected --preset or --layers"));
  EXPECT_THAT(message({"--workload=bert-large", "--server=a:1", "--preset=gpt2-xl"}),
              HasSubstr("--preset and --layers: for the workloads statistics and gradients only"));
  EXPECT_THAT(message({"--workload=statistics", "--server=a:1", "--preset=gpt2-xl", "--layers=f"}),
              HasSubstr("one of --preset and --layers"));
  EXPECT_THAT(message({"--workload=statistics", "--server=a:1", "--preset=vgg"}), HasSubstr("--preset: expected one"));
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
  EXPECT_EQ(RowsCsv(rows), "name,value,unit,limit,ratio,target,pass\na,1.5,ms,,,,true\nb,30,ms,40,0.75,20,false\n");
  const nlohmann::json document = nlohmann::json::parse(RowsJson(rows));
  EXPECT_TRUE(document["rows"][0]["limit"].is_null());
  EXPECT_EQ(document["rows"][1]["target"], 20.0);
  EXPECT_EQ(document["rows"][1]["pass"], false);
}

}  // namespace
}  // namespace precondor

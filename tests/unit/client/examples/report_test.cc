// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "client/cpp/examples/svg_chart.h"

namespace precondor::digits {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

RunResult Curve(const std::vector<double>& losses) {
  RunResult result;
  for (const double loss : losses) {
    result.curve.push_back(CurvePoint{static_cast<int64_t>(10 * (result.curve.size() + 1)), loss, 0.9, loss / 2});
  }
  result.steps = static_cast<int64_t>(10 * losses.size());
  result.statistics_bytes = 2 * result.steps;
  result.gradient_bytes = 300 * result.steps;
  result.seconds = 1.5;
  return result;
}

Row MakeRow(const std::string& task, const std::string& method, const std::vector<std::vector<double>>& curves) {
  Row row;
  row.run.task = *FindTask(task);
  row.run.method = *FindMethod(method);
  row.run.learning_rate = 0.008;
  for (const auto& curve : curves) {
    row.seeds.push_back(row.seeds.size() + 1);
    row.results.push_back(Curve(curve));
  }
  return row;
}

std::vector<Row> TwoRows() {
  return {MakeRow("autoencoder", "none", {{.5, .4, .3}, {.5, .4, .2}}),
          MakeRow("autoencoder", "signed-lowrank", {{.4, .3, .1}, {.5, .4, .25}})};
}

TEST(ReportTest, ComparesSeedBySeedWithAdamw) {
  std::vector<Row> rows = TwoRows();
  rows.push_back(MakeRow("classifier", "signed-lowrank", {{1, 1, 1}}));  // no AdamW row for its task
  CompareWithAdamw(rows);
  EXPECT_EQ(rows[0].steps_to_adamw_final, (std::vector<std::optional<int64_t>>{30, 30}));
  EXPECT_EQ(rows[1].steps_to_adamw_final, (std::vector<std::optional<int64_t>>{20, std::nullopt}));
  EXPECT_TRUE(rows[2].steps_to_adamw_final.empty());
}

TEST(ReportTest, JsonHasEveryField) {
  std::vector<Row> rows = TwoRows();
  CompareWithAdamw(rows);
  ReportContext context;
  context.shards = 2;
  const json value = json::parse(FormatJson(rows, context));
  ASSERT_EQ(value["runs"].size(), 2u);
  const json& run = value["runs"][1];
  EXPECT_EQ(run["task"], "autoencoder");
  EXPECT_EQ(run["method"], "mkor EXACT_DAMPED");
  EXPECT_EQ(run["statistics"], "SIGNED");
  EXPECT_EQ(run["representation"], "low_rank");
  EXPECT_EQ(run["base_optimizer"], "adamw");
  EXPECT_EQ(run["exchange"], "DIRECT");
  EXPECT_EQ(run["workers"], 4);
  EXPECT_EQ(run["shards"], 2);
  EXPECT_EQ(run["learning_rate"], 0.008);
  EXPECT_EQ(run["seeds"], json({1, 2}));
  EXPECT_EQ(run["final_loss"], json({.1, .25}));
  EXPECT_EQ(run["steps_to_adamw_final"], json({20, nullptr}));
  EXPECT_EQ(run["bytes_per_step"]["statistics"], 2);
  EXPECT_EQ(run["bytes_per_step"]["gradients"], 300);
  EXPECT_EQ(run["seconds"], 1.5);
}

TEST(ReportTest, TableShowsMedianSpreadAndNever) {
  std::vector<Row> rows = TwoRows();
  CompareWithAdamw(rows);
  ReportContext context;
  context.shards = 2;
  context.rates_chosen = true;
  context.search = RateSearch{{0.008, 0.016}, {1}, 1};
  const std::string table = FormatTable(rows, context);
  EXPECT_THAT(table, HasSubstr("0.2500 (0.2000-0.3000)"));
  EXPECT_THAT(table, HasSubstr("30 (30-30)"));
  EXPECT_THAT(table, HasSubstr("never (20-never)"));
  EXPECT_THAT(table, HasSubstr("same grid 0.008, 0.016"));
  EXPECT_THAT(table, HasSubstr("4 worker processes, 2 shards, DIRECT"));
}

TEST(ReportTest, ShowsWhereRunsFellBackAndWhatTheyTookBeforeAndAfter) {
  std::vector<Row> rows = TwoRows();
  EXPECT_THAT(FormatTable(rows, ReportContext()), ::testing::Not(HasSubstr("fallback")));
  rows.push_back(MakeRow("autoencoder", "mkor-h", {{.4, .3, .1}, {.5, .4, .25}}));
  rows[2].results[0].stretches = {Stretch{0, Mode::kSecondOrder, 20, 1.0, 400, 6000},
                                  Stretch{20, Mode::kFirstOrder, 10, 0.25, 0, 50}};
  rows[2].results[1].stretches = {Stretch{0, Mode::kSecondOrder, 30, 1.5, 600, 9000}};
  CompareWithAdamw(rows);
  const std::string table = FormatTable(rows, ReportContext());
  EXPECT_THAT(table, HasSubstr("1st order from"));
  EXPECT_THAT(table, HasSubstr("loss-rate"));
  EXPECT_THAT(table, HasSubstr("never (20-never)"));
  const json value = json::parse(FormatJson(rows, ReportContext()));
  EXPECT_EQ(value["runs"][0]["fallback"], "never");
  const json& run = value["runs"][2];
  EXPECT_EQ(run["method"], "mkor-h EXACT_DAMPED");
  EXPECT_EQ(run["fallback"], "loss-rate");
  EXPECT_EQ(run["first_order_from"], json({20, nullptr}));
  ASSERT_EQ(run["modes"][0].size(), 2u);
  EXPECT_EQ(run["modes"][0][0]["mode"], "SECOND_ORDER");
  EXPECT_EQ(run["modes"][0][0]["bytes_per_step"]["statistics"], 20);
  EXPECT_EQ(run["modes"][0][1]["first_step"], 20);
  EXPECT_EQ(run["modes"][0][1]["mode"], "FIRST_ORDER");
  EXPECT_EQ(run["modes"][0][1]["seconds"], 0.25);
  EXPECT_EQ(run["modes"][0][1]["bytes_per_step"]["gradients"], 5);
  EXPECT_EQ(run["modes"][1].size(), 1u);
  rows[2].run.method.fallback = "at-step:3";
  EXPECT_EQ(RowLabel(rows[2]), "mkor-h at-step:3 + adamw");
  EXPECT_EQ(RowLabel(rows[1]), "signed-lowrank + adamw");
}

TEST(MedianTest, CountsNotANumberAsWorst) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(Median({nan, 1, 2}), 2);
  EXPECT_EQ(Median({nan, nan, 1}), std::numeric_limits<double>::infinity());
}

TEST(SvgChartTest, DrawsALineARowWithinThePicture) {
  std::vector<Row> rows = TwoRows();
  rows.push_back(MakeRow("classifier", "signed", {{1, .1, .01}}));
  const std::vector<ChartPanel> panels = PanelsOf(rows);
  ASSERT_EQ(panels.size(), 2u);
  EXPECT_NEAR(panels[0].reference, 0.25, 1e-12);  // median of .3 and .2
  EXPECT_EQ(panels[0].lines[1].points.back().second, 0.175);
  EXPECT_EQ(panels[1].lines[0].points.back().second, 0.005);  // the training loss
  const std::string svg = RenderSvg(panels);
  size_t lines = 0;
  for (size_t at = svg.find("<polyline"); at != std::string::npos; at = svg.find("<polyline", at + 1)) ++lines;
  EXPECT_EQ(lines, 3u);
  EXPECT_THAT(svg, HasSubstr("held-out loss"));
  EXPECT_THAT(svg, HasSubstr("where AdamW alone ends"));
  EXPECT_THAT(svg, HasSubstr("signed-lowrank + adamw (lr 0.008)"));
  EXPECT_THAT(svg, ::testing::Not(HasSubstr("nan")));
}

TEST(SvgChartTest, LeavesOutWhatIsNotANumberAndEscapes) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<Row> rows = {MakeRow("autoencoder", "blend", {{1, nan, nan}})};
  std::vector<ChartPanel> panels = PanelsOf(rows);
  EXPECT_EQ(panels[0].lines[0].points.size(), 1u);
  panels[0].lines[0].label = "a < b & c";
  EXPECT_THAT(RenderSvg(panels), HasSubstr("a &lt; b &amp; c"));
}

}  // namespace
}  // namespace precondor::digits

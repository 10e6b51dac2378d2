// SPDX-License-Identifier: Apache-2.0
#include "precondor/layer_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ModelLayer Layer(const std::string& name, const std::string& kind, int64_t d_out, int64_t d_in) {
  return {.spec = {name, d_out, d_in, false}, .kind = kind};
}

std::vector<ModelLayer> Model() {
  return {Layer("embed", "Embedding", 1000, 64),     Layer("block.0.attn", "Linear", 64, 64),
          Layer("block.0.norm", "LayerNorm", 64, 1), Layer("block.1.attn", "Linear", 64, 64),
          Layer("conv", "Conv2d", 32, 288),          Layer("head", "Linear", 5000, 64)};
}

TEST(LayerRulesTest, LeavesEmbeddingsAndVectorsToTheBaseOptimizer) {
  const auto chosen = ChooseLayers(SessionSpec(), Model(), {});
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_THAT(chosen->place, ElementsAre(std::nullopt, 0, std::nullopt, 1, 2, 3));
  EXPECT_EQ(chosen->layers[2].name, "conv");
  EXPECT_TRUE(chosen->layer_methods.empty());
}

TEST(LayerRulesTest, TheFirstRuleThatMatchesDecides) {
  const MethodConfig kfac{.name = "kfac", .options = {}};
  const std::vector<LayerRule> rules = {
      {.min_dim = 4000, .precondition = false},
      {.name_pattern = "block\\.\\d+\\..*",
       .kind = "Linear",
       .method = kfac,
       .statistics = StatisticsKind::kCovariance},
      {.name_pattern = "block", .precondition = false},  // the whole name: nothing has it
      {.kind = "Conv2d", .statistics = StatisticsKind::kMean},
      {.name_pattern = "embed", .method = MethodConfig{.name = "identity", .options = {}}}};
  SessionSpec spec;
  const auto chosen = ChooseLayers(spec, Model(), rules);
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_THAT(chosen->place, ElementsAre(0, 1, std::nullopt, 2, 3, std::nullopt));
  spec.name = "job";
  spec.layers = chosen->layers;
  spec.layer_methods = chosen->layer_methods;
  EXPECT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
  ASSERT_EQ(spec.layer_methods.size(), 3u) << "equal ones share an entry";
  EXPECT_EQ(MethodOf(spec, 0).name, "identity");
  EXPECT_EQ(MethodOf(spec, 2), kfac);
  EXPECT_EQ(StatisticsOf(spec, 2), StatisticsKind::kCovariance);
  EXPECT_EQ(MethodOf(spec, 3), spec.method);
  EXPECT_EQ(StatisticsOf(spec, 3), StatisticsKind::kMean);
}

TEST(LayerRulesTest, NamesAPatternThatIsNone) {
  const std::vector<LayerRule> rules = {{}, {.name_pattern = "block.(", .precondition = false}};
  const absl::Status status = ChooseLayers(SessionSpec(), Model(), rules).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rules[1].name_pattern: expected a regular expression, got \"block.(\""));
}

}  // namespace
}  // namespace precondor

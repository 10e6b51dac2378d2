// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/mkor_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_join.h"

#include "kernels/methods/registry.h"

namespace precondor {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::IsSupersetOf;

MethodConfig With(const std::string& name, OptionValue value) {
  MethodConfig config;
  config.options[name] = std::move(value);
  return config;
}

TEST(MkorConfigTest, HasTheDocumentedDefaults) {
  const absl::StatusOr<MkorConfig> config = ParseMkorConfig(MethodConfig());
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->rule, UpdateRule::kExactDamped);
  EXPECT_EQ(config->representation, Representation::kAuto);
  EXPECT_EQ(config->scaling.kind, Scaling::kNormRescale);
  EXPECT_EQ(config->rank, 64);
  EXPECT_EQ(config->gamma, 0.95);
  EXPECT_EQ(config->damping, 1.0);
  EXPECT_EQ(config->clip, 100);
  EXPECT_EQ(config->max_factor_dim, 8192);
}

TEST(MkorConfigTest, TheClipDependsOnTheScaling) {
  EXPECT_EQ(ParseMkorConfig(With("scaling", std::string("KL_CLIP")))->scaling.clip, 1e-3);
  EXPECT_EQ(ParseMkorConfig(With("scaling", std::string("RMS_CLIP")))->scaling.clip, 1.1);
}

TEST(MkorConfigTest, SupportsPrecisionByTheirNames) {
  EXPECT_EQ(ParseMkorConfig(MethodConfig())->products, ProductPrecision::kF32);
  EXPECT_EQ(ParseMkorConfig(With("products", std::string("F32")))->products, ProductPrecision::kF32);
  EXPECT_EQ(ParseMkorConfig(With("products", std::string("BF16")))->products, ProductPrecision::kBf16);
  EXPECT_EQ(ParseMkorConfig(With("products", std::string("TF32")))->products, ProductPrecision::kTf32);
}

TEST(MkorConfigTest, AutoIsLowRankWhereItIsCheaper) {
  MkorConfig config;
  config.rank = 64;  // 128 < 0.8 d
  EXPECT_FALSE(config.UsesLowRank(160));
  EXPECT_TRUE(config.UsesLowRank(161));
  config.representation = Representation::kLowRank;
  EXPECT_TRUE(config.UsesLowRank(1));
  config.representation = Representation::kDense;
  EXPECT_FALSE(config.UsesLowRank(4096));
}

TEST(RegistryTest, KnowsItsMethods) {
  EXPECT_THAT(MethodNames(), IsSupersetOf({"mkor", "identity"}));
  MethodConfig config;
  config.name = "adam";
  const absl::Status status = MakeMethod(config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("adam"), HasSubstr(absl::StrJoin(MethodNames(), ", "))));
}

TEST(RegistryTest, WarnsOfWhatTrainsBadly) {
  EXPECT_THAT((*MakeMethod(MethodConfig()))->Warnings(1), IsEmpty());
  EXPECT_THAT((*MakeMethod(With("rule", std::string("PUBLISHED"))))->Warnings(16), ElementsAre(HasSubstr("PUBLISHED")));
  const auto kl_clip = MakeMethod(With("scaling", std::string("KL_CLIP")));
  EXPECT_THAT((*kl_clip)->Warnings(1), ElementsAre(HasSubstr("KL_CLIP")));
  EXPECT_THAT((*kl_clip)->Warnings(4), IsEmpty());
  EXPECT_TRUE((*kl_clip)->needs_global_scale());
}

}  // namespace
}  // namespace precondor

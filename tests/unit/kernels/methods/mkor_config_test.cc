// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/mkor_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tuple>

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

TEST(MkorConfigTest, RefusalsNameTheOptionWhatWasExpectedAndWhatCame) {
  const struct {
    std::string name;
    OptionValue value;
    std::string expected, got;
  } cases[] = {
      {"rule", std::string("EXACT"), "EXACT_DAMPED, REFERENCE, BLEND, PUBLISHED", "\"EXACT\""},
      {"rule", 1.0, "EXACT_DAMPED", "1"},
      {"representation", true, "AUTO, DENSE, LOW_RANK", "true"},
      {"scaling", std::string("norm_rescale"), "NORM_RESCALE", "\"norm_rescale\""},
      {"storage", std::string("BF16"), "F32", "BF16"},
      {"products", std::string("F16"), "F32, BF16, TF32", "F16"},
      {"products", std::string("BF16X3"), "F32, BF16, TF32", "BF16X3"},
      {"storage", std::string("F16"), "F32 with the rules EXACT_DAMPED and PUBLISHED", "F16"},
      {"rank", 0.0, "[1, 1024]", "0"},
      {"rank", 1025.0, "[1, 1024]", "1025"},
      {"rank", 2.5, "a whole number", "2.5"},
      {"rank", std::string("64"), "a number", "\"64\""},
      {"gamma", 1.0, "(0, 1)", "1"},
      {"gamma", 0.0, "(0, 1)", "0"},
      {"gamma", std::nan(""), "(0, 1)", "nan"},
      {"damping", 0.0, "[0.001, 1e+06]", "0"},
      {"damping", -1.0, "[0.001, 1e+06]", "-1"},
      {"scaling_clip", 0.0, "(0, ", "0"},
      {"clip", -1.0, "(0, ", "-1"},
      {"zeta", 1.5, "(0, 1)", "1.5"},
      {"norm_threshold", 0.0, "(0, ", "0"},
      {"max_factor_dim", 0.0, "[1, 1.04858e+06]", "0"},
      {"stat_decay", 0.9, "rank", ""},
  };
  for (const auto& c : cases) {
    const absl::Status status = ParseMkorConfig(With(c.name, c.value)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.name;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(c.name), HasSubstr(c.expected), HasSubstr(c.got)));
  }
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

TEST(RegistryTest, IdentityTakesNoOptions) {
  MethodConfig config = With("rank", 4.0);
  config.name = "identity";
  EXPECT_EQ(MakeMethod(config).status().code(), absl::StatusCode::kInvalidArgument);
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

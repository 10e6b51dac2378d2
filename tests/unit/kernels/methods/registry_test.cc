// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/methods/mkor.h"
#include "tests/support/status_matchers.h"

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
  EXPECT_THAT(MakeMethod(config), StatusIs(absl::StatusCode::kNotFound,
                                           AllOf(HasSubstr("adam"), HasSubstr(absl::StrJoin(MethodNames(), ", ")))));
}

TEST(RegistryTest, WarnsOfWhatTrainsBadly) {
  EXPECT_THAT((*MakeMethod(MethodConfig()))->Warnings(1), IsEmpty());
  EXPECT_THAT((*MakeMethod(With("rule", std::string("PUBLISHED"))))->Warnings(16), ElementsAre(HasSubstr("PUBLISHED")));
  const auto kl_clip = MakeMethod(With("scaling", std::string("KL_CLIP")));
  EXPECT_THAT((*kl_clip)->Warnings(1), ElementsAre(HasSubstr("KL_CLIP")));
  EXPECT_THAT((*kl_clip)->Warnings(4), IsEmpty());
  EXPECT_TRUE((*kl_clip)->needs_global_scale());
}

SessionSpec ThreeLayers() {
  SessionSpec spec;
  spec.layers = {{"first", 3, 4, false}, {"second", 5, 6, false}, {"third", 7, 8, false}};
  return spec;
}

TEST(MethodSetTest, GivesEachLayerItsOwn) {
  SessionSpec spec = ThreeLayers();
  spec.layer_methods = {{.method = {.name = "identity", .options = {}}, .layers = {0, 2}}};
  const absl::StatusOr<MethodSet> set = MethodSet::Make(spec);
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->of(0).name(), "identity");
  EXPECT_EQ(set->of(1).name(), "mkor");
  EXPECT_EQ(&set->of(2), &set->of(0));
}

TEST(MethodSetTest, NamesTheEntryThatIsWrong) {
  SessionSpec spec = ThreeLayers();
  spec.layer_methods = {{.method = {.name = "mkor", .options = {{"rank", -1.0}}}, .layers = {1}}};
  EXPECT_THAT(MethodSet::Make(spec), StatusIs(absl::StatusCode::kInvalidArgument,
                                              testing::AllOf(HasSubstr("layer_methods[0]: "), HasSubstr("rank"))));
}

TEST(MethodSetTest, RefusesCovariancesForMethodsThatTakeVectors) {
  SessionSpec spec = ThreeLayers();
  spec.layer_methods = {
      {.method = {.name = "mkor", .options = {}}, .statistics = StatisticsKind::kCovariance, .layers = {1}}};
  EXPECT_THAT(MethodSet::Make(spec),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 1 \"second\": statistics: expected vectors for method mkor")));
}

TEST(MethodSetTest, RefusesMethodsWhoseFactorsWorkersCannotHold) {
  for (const ExchangeMode mode : {ExchangeMode::kPullFactors, ExchangeMode::kReplay}) {
    SessionSpec spec = ThreeLayers();
    spec.exchange = mode;
    const bool pulls = mode == ExchangeMode::kPullFactors;
    const std::string expected = absl::StrCat("method: expected one of mkor, identity, eva", pulls ? ", kfac" : "",
                                              " with exchange ", ExchangeModeName(mode), ", got ");
    for (const char* method : {"mkor", "eva", "identity", "kfac"}) {
      spec.method.name = method;
      const absl::Status status = MethodSet::Make(spec).status();
      EXPECT_EQ(status.ok(), pulls || spec.method.name != "kfac") << status;
    }
    spec.method.name = "mkor";
    spec.layer_methods = {{.method = {.name = "kron", .options = {}}, .layers = {1}}};
    EXPECT_EQ(MethodSet::Make(spec).status(),
              absl::InvalidArgumentError(absl::StrCat("layer_methods[0].", expected, "kron")));
    spec.method.name = "soap";
    EXPECT_EQ(MethodSet::Make(spec).status(), absl::InvalidArgumentError(absl::StrCat(expected, "soap")));
    spec.exchange = ExchangeMode::kDelegate;
    EXPECT_TRUE(MethodSet::Make(spec).ok()) << MethodSet::Make(spec).status();
  }
}

TEST(MethodSetTest, TraitsSayWhatMethodsOfDefaultOptionsDo) {
  for (const MethodTraits& traits : AllMethodTraits()) {
    SCOPED_TRACE(traits.name);
    SessionSpec spec = ThreeLayers();
    spec.method.name = std::string(traits.name);
    spec.statistics = traits.default_statistics;
    const absl::StatusOr<MethodSet> set = MethodSet::Make(spec);
    ASSERT_TRUE(set.ok()) << set.status();
    const Method& method = set->of(0);
    EXPECT_EQ(method.name(), traits.name);
    EXPECT_EQ(TakesStatistics(spec, 0), method.needs_statistics());
    EXPECT_EQ(traits.default_scaling == Scaling::kKlClip, method.needs_global_scale());
    EXPECT_TRUE(!traits.whole_updates || !method.needs_statistics());
    const std::vector<OptionInfo> options = MethodOptions(traits.name).value();
    const bool scales = absl::c_any_of(options, [](const OptionInfo& one) { return one.name == "scaling"; });
    EXPECT_EQ(traits.default_scaling != Scaling::kNone, scales);
    EXPECT_THAT(method.Warnings(VectorsPerStep(spec, 0)), ::testing::IsEmpty());
  }
}

}  // namespace
}  // namespace precondor

// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/session_spec.h"

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace precondor {
namespace {

using testing::HasSubstr;

SessionSpec GoodSpec() {
  SessionSpec spec;
  spec.name = "run-7";
  spec.world_size = 4;
  spec.layers = {{"enc", 48, 65, true}, {"dec", 64, 49, true}};
  return spec;
}

LayerMethod OfLayers(std::vector<uint32_t> layers) {
  return {.method = {.name = "eva", .options = {{"mu", 0.1}}},
          .statistics = StatisticsKind::kMean,
          .layers = std::move(layers)};
}

TEST(SessionSpecTest, AcceptsAGoodSpec) { EXPECT_TRUE(ValidateSessionSpec(GoodSpec()).ok()); }

TEST(SessionSpecTest, NamesTheFieldWhatWasExpectedAndWhatCame) {
  struct Case {
    std::function<void(SessionSpec&)> spoil;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {[](SessionSpec& s) { s.name = ""; }, {"name", "[A-Za-z0-9._-]"}},
      {[](SessionSpec& s) { s.name = "a b"; }, {"name", "a b"}},
      {[](SessionSpec& s) { s.name = std::string(129, 'x'); }, {"name", "129"}},
      {[](SessionSpec& s) { s.world_size = 0; }, {"world_size", "1 ... 65536", "0"}},
      {[](SessionSpec& s) { s.sketches = 17; }, {"sketches", "0 ... 16", "17"}},
      {[](SessionSpec& s) { s.inv_freq = 0; }, {"inv_freq", "got 0"}},
      {[](SessionSpec& s) { s.warmup_steps = -1; }, {"warmup_steps", "-1"}},
      {[](SessionSpec& s) { s.layers.clear(); }, {"layers", "got 0"}},
      {[](SessionSpec& s) { s.layers[1].d_out = 0; }, {"layers[1]", "dec", "d_out", "got 0"}},
      {[](SessionSpec& s) { s.layers[0].d_in = kMaxDimension + 1; }, {"layers[0]", "d_in", "1048577"}},
      {[](SessionSpec& s) { s.layers[0].d_in = 1; }, {"layers[0]", "d_in", "2 ..."}},  // a bias alone is no layer
      {[](SessionSpec& s) { s.layers[1].name = "enc"; }, {"layers[1]", "enc", "twice"}},
      {[](SessionSpec& s) {
         s.layers[0].shape = {48, 65};
       },
       {"layers[0]", "enc", "shape", "none with has_bias"}},
      {[](SessionSpec& s) {
         s.layers[1] = {"conv", 64, 48, false, {64, 3, 4, 3}};
       },
       {"layers[1]", "conv", "shape", "64 x 48 = 3072 elements", "[64, 3, 4, 3]"}},
      {[](SessionSpec& s) {
         s.layers[1] = {"conv", 64, 48, false, {64, 0, 48}};
       },
       {"layers[1]", "shape[1]", "got 0"}},
      {[](SessionSpec& s) {
         s.layers[1] = {"conv", 64, 48, false, std::vector<int64_t>(9, 1)};
       },
       {"layers[1]", "shape: dimensions", "1 ... 8", "got 9"}},
      {[](SessionSpec& s) {
         s.layers[1] = {"conv", 64, 48, false, std::vector<int64_t>(8, 1 << 20)};
       },
       {"layers[1]", "shape", "3072 elements"}},  // 2^160 of them
      {[](SessionSpec& s) { s.layers[1].name = ""; }, {"layers[1]", "name"}},
      {[](SessionSpec& s) { s.layers[1].name = std::string(513, 'x'); }, {"layers[1]", "name", "513"}},
      {[](SessionSpec& s) { s.layers[1].name = "a\x1b[2J\u202e"; }, {"layers[1]", "printable", "a\\u001b[2J\\u202e"}},
      {[](SessionSpec& s) { s.layers[0].d_out = -1; }, {"layers[0]", "d_out", "-1"}},
      {[](SessionSpec& s) { s.world_size = kMaxWorldSize + 1; }, {"world_size", "65537"}},
      {[](SessionSpec& s) { s.sketches = -1; }, {"sketches", "-1"}},
      {[](SessionSpec& s) { s.exchange = ExchangeMode(9); }, {"exchange", "9"}},
      {[](SessionSpec& s) { s.statistics = StatisticsKind(0); }, {"statistics", "got 0"}},
      {[](SessionSpec& s) { s.statistics_dtype = DType(4); }, {"statistics_dtype", "4"}},
      {[](SessionSpec& s) { s.gradient_dtype = DType(0); }, {"gradient_dtype", "got 0"}},
      {[](SessionSpec& s) { s.fallback.beta = 2; }, {"fallback.beta", "[0, 1]", "got 2"}},
      {[](SessionSpec& s) { s.layer_methods = {{}}; }, {"layer_methods[0].layers", "at least one", "none"}},
      {[](SessionSpec& s) { s.layer_methods.resize(kMaxLayerMethods + 1); }, {"layer_methods: count", "256", "257"}},
      {[](SessionSpec& s) { s.layer_methods = {OfLayers({2})}; }, {"layer_methods[0].layers", "0 ... 1", "got 2"}},
      {[](SessionSpec& s) {
         s.layer_methods = {OfLayers({1, 0})};
       },
       {"ascending", "0 after 1"}},
      {[](SessionSpec& s) {
         s.layer_methods = {OfLayers({0, 0})};
       },
       {"ascending", "0 after 0"}},
      {[](SessionSpec& s) {
         s.layer_methods = {OfLayers({1}), OfLayers({0, 1})};
       },
       {"layer_methods[1].layers", "no earlier entry", "1 \"dec\""}},
      {[](SessionSpec& s) {
         s.layer_methods = {OfLayers({1})};
         s.layer_methods[0].statistics = StatisticsKind(5);
       },
       {"layer_methods[0].statistics", "got 5"}},
  };
  for (const Case& c : cases) {
    SessionSpec spec = GoodSpec();
    c.spoil(spec);
    const absl::Status status = ValidateSessionSpec(spec);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    for (const std::string& part : c.parts) EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(SessionSpecTest, AcceptsWhatIsExactlyAtTheLimits) {
  SessionSpec spec = GoodSpec();
  spec.name = std::string(128, 'x');
  spec.world_size = kMaxWorldSize;
  spec.sketches = kMaxSketches;
  spec.warmup_steps = 0;
  spec.inv_freq = 1;
  spec.layers = {{std::string(512, 'x'), 1, 1, false}, {"big", kMaxDimension, kMaxDimension, true}};
  EXPECT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
}

TEST(SessionSpecTest, TakesShapesOfAsManyElements) {
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {}, {64, 48}, {3072}, {64, 3, 4, 4}, {16, 4, 48}, {1, 64, 1, 48}, {2, 2, 2, 2, 2, 2, 6, 8}}) {
    SessionSpec spec = GoodSpec();
    spec.layers[1] = {"conv", 64, 48, false, shape};
    EXPECT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
    EXPECT_EQ(TensorDims(spec.layers[1]), shape.empty() ? (std::vector<int64_t>{64, 48}) : shape);
  }
}

TEST(SessionSpecTest, DescribesTheFirstDifference) {
  EXPECT_EQ(DescribeDifference(GoodSpec(), GoodSpec()), "");
  const std::vector<std::pair<std::function<void(SessionSpec&)>, std::string>> cases = {
      {[](SessionSpec& s) { s.seed = 5; }, "seed: have 0, got 5"},
      {[](SessionSpec& s) { s.world_size = 2; }, "world_size: have 4, got 2"},
      {[](SessionSpec& s) { s.exchange = ExchangeMode::kDelegate; }, "exchange: have DIRECT, got DELEGATE"},
      {[](SessionSpec& s) { s.gradient_dtype = DType::kBF16; }, "gradient_dtype: have f32, got bf16"},
      {[](SessionSpec& s) { s.method.options["rank"] = 8.0; }, "method: have mkor{}, got mkor{rank=8}"},
      {[](SessionSpec& s) { s.fallback.policy = FallbackPolicy::kLossRate; },
       "fallback.policy: have NEVER, got LOSS_RATE"},
      {[](SessionSpec& s) { s.fallback.at_step = 7; }, "fallback.at_step: have none, got 7"},
      {[](SessionSpec& s) { s.fallback.rate_decay = 0.5; }, "fallback.rate_decay: have 0.99, got 0.5"},
      {[](SessionSpec& s) { s.fallback.lr_jump = 0.5; }, "fallback.lr_jump: have 0.1, got 0.5"},
      {[](SessionSpec& s) { s.fallback.min_steps = 5; }, "fallback.min_steps: have 200, got 5"},
      {[](SessionSpec& s) { s.fallback.beta = 0.5; }, "fallback.beta: have 0.1, got 0.5"},
      {[](SessionSpec& s) { s.fallback.patience_steps = 5; }, "fallback.patience_steps: have 50, got 5"},
      {[](SessionSpec& s) { s.layers.pop_back(); }, "layers: have 2, got 1"},
      {[](SessionSpec& s) {
         s.layers[1].shape = {8, 8, 49};
       },
       "layers[1]: have \"dec\" [64, 49] with bias, got \"dec\" [64, 49] with bias of shape [8, 8, 49]"},
      {[](SessionSpec& s) { s.layers[1].d_in = 50; }, "layers[1]: have \"dec\" [64, 49] with bias, got"},
      {[](SessionSpec& s) { s.layer_methods = {OfLayers({1})}; },
       "layers[1] \"dec\": have mkor{} SIGNED, got eva{mu=0.1} MEAN"},
  };
  for (const auto& [change, expected] : cases) {
    SessionSpec want = GoodSpec();
    change(want);
    EXPECT_THAT(DescribeDifference(GoodSpec(), want), HasSubstr(expected));
  }
  // The values differ, and their texts do not.
  SessionSpec have = GoodSpec(), want = GoodSpec();
  have.layer_methods = want.layer_methods = {OfLayers({1})};
  EXPECT_EQ(DescribeDifference(have, want), "");
  have.layer_methods[0].method.options["mu"] = 1.0;
  want.layer_methods[0].method.options["mu"] = 0.9999999;
  EXPECT_THAT(DescribeDifference(have, want), HasSubstr("layers[1] \"dec\""));
}

TEST(SessionSpecTest, TakesStatisticsInWarmUpAndAtEveryInvFreq) {
  SessionSpec spec = GoodSpec();
  spec.warmup_steps = 3;
  spec.inv_freq = 5;
  std::vector<uint64_t> steps;
  for (uint64_t step = 0; step < 16; ++step) {
    if (IsStatisticStep(spec, step)) steps.push_back(step);
  }
  EXPECT_THAT(steps, testing::ElementsAre(0, 1, 2, 5, 10, 15));
}

TEST(SessionSpecTest, CountsVectors) {
  SessionSpec spec = GoodSpec();
  EXPECT_EQ(VectorsPerWorker(spec, 0), 4) << "SIGNED: ceil(16 / 4)";
  EXPECT_EQ(VectorsPerStep(spec, 0), 16);
  spec.world_size = 7;
  EXPECT_EQ(VectorsPerWorker(spec, 0), 3);
  spec.sketches = 2;
  EXPECT_EQ(VectorsPerStep(spec, 0), 14);
  spec.statistics = StatisticsKind::kPerWorkerMean;
  EXPECT_EQ(VectorsPerStep(spec, 0), 7);
  spec.statistics = StatisticsKind::kMean;
  EXPECT_EQ(VectorsPerStep(spec, 0), 1);
}

TEST(SessionSpecTest, LayersMayHaveMethodsAndStatisticsOfTheirOwn) {
  SessionSpec spec = GoodSpec();
  spec.layer_methods = {OfLayers({1})};
  EXPECT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
  EXPECT_EQ(MethodOf(spec, 0).name, "mkor");
  EXPECT_EQ(MethodOf(spec, 1).name, "eva");
  EXPECT_EQ(StatisticsOf(spec, 0), StatisticsKind::kSigned);
  EXPECT_EQ(StatisticsOf(spec, 1), StatisticsKind::kMean);
  EXPECT_EQ(VectorsPerStep(spec, 0), 16);
  EXPECT_EQ(VectorsPerStep(spec, 1), 1);
  spec.statistics = StatisticsKind::kMean;
  EXPECT_FALSE(UsesSketches(spec));
  spec.layer_methods[0].statistics = StatisticsKind::kSigned;
  EXPECT_TRUE(UsesSketches(spec));
}

TEST(SessionSpecTest, RowsAreFewerElementsThanThePackedTriangle) {
  EXPECT_EQ(PackedElements(1), 1);
  EXPECT_EQ(PackedElements(4), 10);
  for (const int64_t d : {1, 2, 3, 4, 7, 64, 1000}) {
    EXPECT_LT(MaxRows(d) * d, PackedElements(d)) << d;
    EXPECT_GE((MaxRows(d) + 1) * d, PackedElements(d)) << d;
  }
  SessionSpec spec = GoodSpec();
  spec.statistics = StatisticsKind::kCovariance;
  EXPECT_EQ(VectorsPerStep(spec, 1), MaxRows(64));
}

TEST(SessionSpecTest, SpreadsDelegatesOverRanks) {
  const SessionSpec spec = GoodSpec();
  for (int64_t layer = 0; layer < 9; ++layer) EXPECT_EQ(DelegateRank(spec, layer), layer % 4);
}

TEST(SessionSpecTest, DelegatesAreOneRankForEachLayerOfDelegate) {
  SessionSpec spec = GoodSpec();
  spec.exchange = ExchangeMode::kDelegate;
  spec.delegates.assign(spec.layers.size(), 3);
  ASSERT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
  EXPECT_EQ(DelegateRank(spec, 0), 3);
  const auto refusal = [](SessionSpec bad) { return std::string(ValidateSessionSpec(bad).message()); };
  SessionSpec bad = spec;
  bad.delegates.back() = 4;
  EXPECT_THAT(refusal(bad), HasSubstr("delegates: expected ranks of 0 ... 3, got 4"));
  bad.delegates.pop_back();
  EXPECT_THAT(refusal(bad), HasSubstr("delegates: expected none, or one for each of"));
  bad = spec;
  bad.exchange = ExchangeMode::kDirect;
  EXPECT_THAT(refusal(bad), HasSubstr("delegates: expected none with exchange DIRECT"));
  SessionSpec other = spec;
  other.delegates.front() = 1;
  EXPECT_THAT(DescribeDifference(spec, other), HasSubstr("delegates: have [3"));
}

using Change = std::function<void(FallbackConfig&)>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(FallbackConfigTest, NamesTheFieldWhatWasExpectedAndWhatCame) {
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(0); }, "fallback.policy: expected 1, 2 or 4, got 0"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(3); }, "fallback.policy: expected 1, 2 or 4, got 3"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy(5); }, "fallback.policy: expected 1, 2 or 4, got 5"},
      {[](FallbackConfig& c) { c.policy = FallbackPolicy::kAtStep; }, "fallback.at_step: expected a step, for AT_STEP"},
      {[](FallbackConfig& c) { c.rate_decay = -0.5; }, "fallback.rate_decay: expected a number in [0, 1), got -0.5"},
      {[](FallbackConfig& c) { c.rate_decay = kNaN; }, "fallback.rate_decay"},
      {[](FallbackConfig& c) { c.lr_jump = 0; }, "fallback.lr_jump: expected a positive number, got 0"},
      {[](FallbackConfig& c) { c.lr_jump = kInf; }, "fallback.lr_jump"},
      {[](FallbackConfig& c) { c.min_steps = 0; }, "fallback.min_steps: expected 1 ... 1073741824, got 0"},
      {[](FallbackConfig& c) { c.beta = 1.5; }, "fallback.beta: expected a number in [0, 1], got 1.5"},
      {[](FallbackConfig& c) { c.beta = kNaN; }, "fallback.beta"},
      {[](FallbackConfig& c) { c.patience_steps = 0; }, "fallback.patience_steps: expected 1 ..."},
  };
  for (const auto& [spoil, text] : cases) {
    FallbackConfig config;
    spoil(config);
    const absl::Status status = ValidateFallbackConfig(config);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
}

TEST(FallbackConfigTest, AcceptsDefaultsAndWhatIsExactlyAtTheLimits) {
  EXPECT_TRUE(ValidateFallbackConfig({}).ok());
  FallbackConfig config = {
      .policy = FallbackPolicy::kAtStep, .at_step = 0, .rate_decay = 0, .min_steps = 1, .beta = 0, .patience_steps = 1};
  EXPECT_TRUE(ValidateFallbackConfig(config).ok()) << ValidateFallbackConfig(config);
  config.beta = 1;
  EXPECT_TRUE(ValidateFallbackConfig(config).ok());
}

}  // namespace
}  // namespace precondor

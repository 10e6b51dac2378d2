// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/reduction.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

std::vector<float> Ramp(int64_t size, float scale) {
  std::vector<float> values(size);
  for (int64_t i = 0; i < size; ++i) values[i] = scale * std::sin(static_cast<float>(i));
  return values;
}

TEST(WeightedSumTest, IsTheSampleWeightedMean) {
  WeightedSum sum = WeightedSum::Make(2).value();
  sum.Add(1, std::vector<float>{1, -2});
  sum.Add(3, std::vector<float>{5, 6});
  std::vector<float> out(2);
  sum.Finish(absl::MakeSpan(out));
  EXPECT_THAT(out, ElementsAre(4.0f, 4.0f));
}

TEST(WeightedSumTest, GivesOneContributionBackExactly) {
  const std::vector<float> values = Ramp(3000, 1e-3f);
  for (const uint64_t samples : {uint64_t{1}, uint64_t{3}, uint64_t{32}, (uint64_t{1} << 29) - 1}) {
    WeightedSum sum = WeightedSum::Make(values.size()).value();
    sum.Add(samples, values);
    std::vector<float> out(values.size());
    sum.Finish(absl::MakeSpan(out));
    EXPECT_EQ(out, values) << samples;
  }
}

TEST(WeightedSumTest, WireFormsAddUpLikeTheirDecodedValues) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const std::vector<float> values = Ramp(2500, 1.0f);
    std::vector<uint8_t> bytes(values.size() * ByteSize(dtype));
    EncodeElements(dtype, values, 0.5f, bytes.data());
    std::vector<float> decoded(values.size());
    DecodeElements(dtype, bytes.data(), 0.5f, absl::MakeSpan(decoded));
    WeightedSum wire = WeightedSum::Make(values.size()).value();
    WeightedSum plain = WeightedSum::Make(values.size()).value();
    for (const uint64_t samples : {3, 5}) {
      wire.Add(samples, dtype, bytes.data(), 0.5f);
      plain.Add(samples, decoded);
    }
    std::vector<float> from_wire(values.size());
    std::vector<float> from_plain(values.size());
    wire.Finish(absl::MakeSpan(from_wire));
    plain.Finish(absl::MakeSpan(from_plain));
    EXPECT_EQ(from_wire, from_plain) << DTypeName(dtype);
  }
}

TEST(WeightedSumTest, AccumulatesWiderThanF32) {
  // In f32 the ones would be lost beside 2^24.
  WeightedSum sum = WeightedSum::Make(1).value();
  sum.Add(1, std::vector<float>{16777216.0f});
  for (int i = 0; i < 3; ++i) sum.Add(1, std::vector<float>{1.0f});
  std::vector<float> out(1);
  sum.Finish(absl::MakeSpan(out));
  EXPECT_EQ(out[0], static_cast<float>((16777216.0 + 3.0) / 4.0));
}

TEST(StackingScalesTest, MakeTheStackedAverageTheWeightedAverage) {
  const std::vector<uint64_t> samples = {5, 1, 10, 16};
  const std::vector<double> scales = StackingScales(samples);
  double total = 0;
  for (uint64_t n : samples) total += static_cast<double>(n);
  for (size_t r = 0; r < samples.size(); ++r) {
    // (1 / W) scale^2 = n_r / N.
    EXPECT_NEAR(scales[r] * scales[r] / static_cast<double>(samples.size()), static_cast<double>(samples[r]) / total,
                1e-15);
  }
}

TEST(StackingScalesTest, EqualSamplesAreNotScaledAtAll) {
  for (const size_t workers : {1, 3, 7, 8}) {
    EXPECT_THAT(StackingScales(std::vector<uint64_t>(workers, 37)), Each(1.0)) << workers;
  }
}

TEST(SquaredNormTest, SumsEveryElementForAnyLength) {
  for (const int64_t size : {0, 1, 7, 8, 9, 1000, 1003}) {
    double expected = 0;
    const std::vector<float> values = Ramp(size, 2.0f);
    for (float value : values) expected += static_cast<double>(value) * value;
    EXPECT_NEAR(SquaredNorm(values), expected, 1e-12 * (1 + expected)) << size;
  }
}

TEST(SquaredNormTest, IsNotFiniteWhenAnElementIsNot) {
  for (const size_t place : {0, 7, 8, 15, 16}) {
    std::vector<float> values(17, 1.0f);
    values[place] = std::numeric_limits<float>::infinity();
    EXPECT_FALSE(std::isfinite(SquaredNorm(values)));
    values[place] = std::nanf("");
    EXPECT_FALSE(std::isfinite(SquaredNorm(values)));
  }
  EXPECT_TRUE(std::isfinite(SquaredNorm(std::vector<float>(17, std::numeric_limits<float>::max()))));
}

}  // namespace
}  // namespace precondor

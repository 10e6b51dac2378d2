// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/dtype.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

// The value of an IEEE binary16 from its definition.
double HalfValue(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

uint16_t Encode(DType dtype, float value) {
  uint16_t bits = 0;
  EncodeElements(dtype, absl::MakeConstSpan(&value, 1), 1.0f, &bits);
  return bits;
}

float Decode(DType dtype, uint16_t bits) {
  float value = 0;
  DecodeElements(dtype, &bits, 1.0f, absl::MakeSpan(&value, 1));
  return value;
}

TEST(DTypeTest, DecodesEveryHalfAndEncodesItBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const double expected = HalfValue(half);
    const float got = Decode(DType::kF16, half);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(HalfValue(Encode(DType::kF16, got)))) << bits;
    } else {
      ASSERT_EQ(expected, got) << bits;
      ASSERT_EQ(Encode(DType::kF16, got), half) << bits;
    }
  }
}

TEST(DTypeTest, RoundsHalvesToNearestEven) {
  // Between every two neighbours: the tie goes to the even one, anything off it to the nearer.
  for (uint16_t low = 0; low < 0x7bff; ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const auto middle = static_cast<float>((HalfValue(low) + HalfValue(high)) / 2);
    const uint16_t even = (low & 1) == 0 ? low : high;
    ASSERT_EQ(Encode(DType::kF16, middle), even) << low;
    ASSERT_EQ(Encode(DType::kF16, std::nextafter(middle, 0.0f)), low) << low;
    ASSERT_EQ(Encode(DType::kF16, std::nextafter(middle, INFINITY)), high) << low;
    ASSERT_EQ(Encode(DType::kF16, -middle), even | 0x8000) << low;
  }
}

TEST(DTypeTest, OverflowsHalvesToInfinity) {
  EXPECT_EQ(Encode(DType::kF16, 65519.996f), 0x7bff);  // just under the tie between the largest and the next
  EXPECT_EQ(Encode(DType::kF16, 65520.0f), 0x7c00);
  EXPECT_EQ(Encode(DType::kF16, -1e30f), 0xfc00);
  EXPECT_EQ(Encode(DType::kF16, INFINITY), 0x7c00);
}

TEST(DTypeTest, RoundsBrainFloatsToNearestEven) {
  EXPECT_EQ(Encode(DType::kBF16, std::bit_cast<float>(0x3f808000u)), 0x3f80);  // tie, even below
  EXPECT_EQ(Encode(DType::kBF16, std::bit_cast<float>(0x3f818000u)), 0x3f82);  // tie, even above
  EXPECT_EQ(Encode(DType::kBF16, std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_EQ(Encode(DType::kBF16, std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_TRUE(std::isnan(Decode(DType::kBF16, Encode(DType::kBF16, NAN))));
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Decode(DType::kBF16, static_cast<uint16_t>(bits));
    if (!std::isnan(value)) {
      ASSERT_EQ(Encode(DType::kBF16, value), bits);
    }
  }
}

// Long spans go through vector loops, single elements do not.
TEST(DTypeTest, LongSpansGetTheBitsOfSingleElements) {
  std::vector<float> values;
  for (uint32_t i = 0; i < 5003; ++i) values.push_back(std::bit_cast<float>(i * 0x9e3779b9u));  // every exponent
  for (float special : {NAN, INFINITY, -INFINITY, -0.0f, 65519.996f, 65520.0f, 6.1e-5f, 5.9e-8f, 1e-45f}) {
    values.insert(values.begin() + 40, special);
  }
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (size_t count : {size_t{1}, size_t{7}, size_t{31}, size_t{64}, values.size()}) {
      std::vector<char> bytes(2 * count + 1);
      std::vector<float> back(count);
      EncodeElements(dtype, absl::MakeConstSpan(values).first(count), 1.0f, bytes.data() + 1);
      DecodeElements(dtype, bytes.data() + 1, 1.0f, absl::MakeSpan(back));
      for (size_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, bytes.data() + 1 + 2 * i, 2);
        ASSERT_EQ(bits, Encode(dtype, values[i])) << values[i];
        ASSERT_EQ(std::bit_cast<uint32_t>(back[i]), std::bit_cast<uint32_t>(Decode(dtype, bits))) << values[i];
      }
    }
  }
}

TEST(DTypeTest, ReadsAndWritesAtAnyAlignment) {
  const std::vector<float> values = {1.5f, -2.0f, 0.0f, 96.0f, -0.25f};
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<char> bytes(1 + values.size() * ByteSize(dtype) + 1, '#');
    EncodeElements(dtype, values, 1.0f, bytes.data() + 1);
    EXPECT_EQ(bytes.front(), '#');
    EXPECT_EQ(bytes.back(), '#');
    std::vector<float> back(values.size());
    DecodeElements(dtype, bytes.data() + 1, 1.0f, absl::MakeSpan(back));
    EXPECT_EQ(back, values);
  }
}

TEST(DTypeTest, DividesByTheScaleAndMultipliesBack) {
  const std::vector<float> values = {3.0e6f, -1.0e5f, 0.0f};
  const float scale = F16Scale(values);
  EXPECT_GT(scale, 1.0f);
  EXPECT_EQ(std::exp2(std::round(std::log2(scale))), scale) << "a power of two loses nothing";
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<char> bytes(values.size() * ByteSize(dtype));
    std::vector<float> back(values.size());
    EncodeElements(dtype, values, scale, bytes.data());
    DecodeElements(dtype, bytes.data(), scale, absl::MakeSpan(back));
    for (size_t i = 0; i < values.size(); ++i) {
      // Half a unit in the last place of bf16, the coarsest of them.
      EXPECT_NEAR(back[i], values[i], std::fabs(values[i]) / 256) << DTypeName(dtype);
    }
  }
}

TEST(DTypeTest, ScalesOnlyWhatWouldNotFit) {
  EXPECT_EQ(F16Scale(std::vector<float>{}), 1.0f);
  EXPECT_EQ(F16Scale(std::vector<float>{0, -16384.0f}), 1.0f);
  EXPECT_EQ(F16Scale(std::vector<float>{INFINITY, 1e9f}), 1.0f);
  for (float largest : {16385.0f, 65504.0f, 1e9f, 3e38f}) {
    const float scaled = largest / F16Scale(std::vector<float>{1.0f, -largest});
    EXPECT_LE(scaled, 16384.0f) << largest;
    EXPECT_GE(scaled, 8192.0f) << largest;
  }
}

TEST(DTypeTest, FindsWhatIsNotFinite) {
  std::vector<float> values(67, std::numeric_limits<float>::max());
  EXPECT_TRUE(AllFinite(values));
  EXPECT_TRUE(AllFinite({}));
  for (float bad : {NAN, INFINITY, -INFINITY}) {
    for (size_t i : {size_t{0}, size_t{33}, size_t{66}}) {
      std::vector<float> copy = values;
      copy[i] = bad;
      EXPECT_FALSE(AllFinite(copy)) << bad << " at " << i;
    }
  }
}

TEST(DTypeTest, Names) {
  EXPECT_EQ(DTypeName(DType::kF32), "f32");
  EXPECT_EQ(DTypeName(DType::kF16), "f16");
  EXPECT_EQ(DTypeName(DType::kBF16), "bf16");
}

}  // namespace
}  // namespace precondor
